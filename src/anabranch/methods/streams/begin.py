"""Initial weights of a training of streams: the scale of the target's states, or another adapter's weights."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.drafting.trained import adopt_shape
from anabranch.errors import InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.recipe import Recipe
from anabranch.learning.target import run_frozen
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.config import StreamConfig
from anabranch.model.decoder import Decoder

__all__ = ["adopt_streams", "begin_with", "scale_to_target"]

SAMPLE = 64  # tokens
RANKS = ("adapter_rank", "attention_rank", "mlp_rank")
STEP = 10.0  # a step moves an embedding by the learning rate times this, times the states' root mean square


def scale_to_target(target: Decoder, adapter: StreamAdapter) -> None:
    """Let embeddings that alone tell streams apart learn as fast as the states that they are added to are large.

    A step of Adam moves every weight by about the learning rate. The states at the entry of the top layers have root
    mean squares from about 1 to 20, so embeddings would need many thousands of steps to matter, and until then all
    streams of a token are the same. Streams with other weights of their own (``StreamConfig.bare`` is False) keep the
    learning rate: what those weights add makes up for it.
    """
    if not adapter.shape.bare or adapter.embeddings is None:
        return
    ids = torch.linspace(0, target.config.vocab_size - 1, SAMPLE).long().tolist()
    batch = Batch.of([Example(tuple(ids[:1]), tuple(ids[1:]))])
    x_BTD = run_frozen(target, batch, taps=(adapter.start,)).taps[adapter.start]
    # the median: the first token's state is often a thousand times as large
    size = float(x_BTD.float().square().mean(-1).sqrt().median())
    adapter.embedding_rate = max(1.0, 2.0 ** round(math.log2(STEP * size)))  # the same on any machine


def adopt_streams(recipe: Recipe, config: StreamConfig) -> Recipe:
    """The recipe with the shape of trained streams, except what the user has set and what its mode decides."""
    mine: StreamConfig = recipe.config
    root = 0 if mine.main_attends == "own" else config.root_width  # computed before the next token is known
    return adopt_shape(recipe, replace(config, mode=mine.mode, main_attends=mine.main_attends, root_width=root))


def begin_with(adapter: StreamAdapter, trained: StreamAdapter) -> None:
    """Copy the weights of ``trained`` into the fresh ``adapter``, which keeps its own draft vocabulary.

    ``trained`` may lack the root term (it then starts at zero) or have one that is not wanted (it is left out), have
    fewer streams (new ones start as copies of the last one), fewer layers (new ones are below its own and start at
    zero), and lower ranks (what is new starts at zero). The streams of a frozen target are also a start for shared
    mode, whose terms of the target's layers start at zero. Raises InputError if anything else differs.
    """
    mine, theirs = adapter.config.to_dict(), trained.config.to_dict()
    theirs |= {name: mine[name] for name in ("mode", "main_attends", "lora_rank")}
    if not (theirs["root_width"] and mine["root_width"]):
        theirs["root_width"] = mine["root_width"]
    more = mine["num_streams"] - theirs["num_streams"]
    lower = mine["num_stream_layers"] - theirs["num_stream_layers"]
    for name in ("num_streams", "num_stream_layers", *RANKS):
        theirs[name] = mine[name] if mine[name] > theirs[name] else theirs[name]
    for name, value in mine.items():
        if theirs[name] != value:
            raise InputError(
                f"it has {name} {theirs[name]!r}, but this training uses {value!r}; start from another adapter or give "
                "the same option"
            )
    weights = {name: value for name, value in trained.state_dict().items() if name != "vocabulary"}
    for name in ("embeddings", "root.streams"):  # one row per stream
        if more > 0 and name in weights:
            weights[name] = torch.cat((weights[name], weights[name][-1:].expand(more, -1)))
    own = adapter.state_dict()
    moved = {}  # layers are counted from the top of the target
    for name in [name for name in weights if name.startswith("layers.") and lower > 0]:
        _, index, rest = name.split(".", 2)
        moved[f"layers.{int(index) + lower}.{rest}"] = weights.pop(name)
    grown = {name: _grown(weight, own.get(name)) for name, weight in (weights | moved).items()}
    adapter.load_state_dict(grown, strict=False)


def _grown(weight: Tensor, fresh: Tensor | None) -> Tensor:
    """A weight in the leading corner of a fresh one, which is as large or larger in each axis: of a higher rank."""
    if fresh is None or fresh.shape == weight.shape:
        return weight
    grown = fresh.clone()
    grown[tuple(slice(n) for n in weight.shape)] = weight
    return grown
