"""ACL figure 6: gradient norms of the streams' loss by layer, beside those of the next-token loss.

Both losses are means over the same completion positions of the same texts, and gradients are those of the target's MLP
weights. The streams' loss reaches layers below N - N_s through the main rows that streams start from, and all lower
layers through the keys and values of the main stream.

P positions, S streams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.learning.examples import Example
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.rider import trail
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from studies.base import Chart, Line, Result, Setup, Study, Table, rounded, streams_of
from studies.forward import Rows, causal, rows_pass

__all__ = ["STUDY", "gradient_norms", "next_token_loss", "streams_loss"]

MOST = 48  # positions of a text


def next_token_loss(target: Decoder, rows: Rows, example: Example) -> Tensor:
    """Mean cross-entropy of the completion's tokens under the main stream."""
    tokens, positions_P = _places(example)
    return F.cross_entropy(target.logits(rows.hidden_1RD[0, positions_P]).float(), tokens[positions_P + 1])


def streams_loss(target: Decoder, adapter: StreamAdapter, rows: Rows, example: Example) -> Tensor:
    """Mean cross-entropy of stream j's token t + 1 + j, all streams weighted alike; gradients reach the target."""
    tokens, positions_P = _places(example)
    start, length = adapter.start, len(tokens)
    behind = positions_P[:, None] - torch.arange(length)
    window = target.config.sliding_window
    visible = [
        ((behind >= 0) & (behind < window) if window is not None and target.config.is_sliding(layer) else behind >= 0)
        for layer in range(start, target.config.num_layers)
    ]
    emitted = None if adapter.root is None else target.embedding(tokens[positions_P + 1])[None]
    states = trail(
        target,
        adapter,
        rows.entries[start][:, positions_P],
        emitted,
        positions_P[None],
        rows.keys_values[start:],
        [mask[None] for mask in visible],
        length,
    )[0]
    index_PS = positions_P[:, None] + 1 + torch.arange(1, adapter.shape.num_streams + 1)
    inside = index_PS < length
    wanted = tokens[index_PS.clamp(max=length - 1)][inside]
    return F.cross_entropy(target.logits(states[inside]).float(), wanted)


def _places(example: Example) -> tuple[Tensor, Tensor]:
    """The text [T], and the positions before its completion tokens but the last, ``MOST`` at most [P]."""
    first = len(example.prompt_ids) - 1
    last = min(len(example) - 2, first + MOST)
    return torch.tensor((*example.prompt_ids, *example.answer_ids)), torch.arange(first, last)


def gradient_norms(target: Decoder, examples: Sequence[Example], adapter: StreamAdapter | None = None) -> list[float]:
    """L2 norms of the mean loss's gradient by layer of the target's MLPs; of the next-token loss without an adapter."""
    blocks = [block for block in target.blocks if isinstance(block, Block)]
    weights = [list(block.mlp.parameters()) for block in blocks]
    flat = [weight for layer in weights for weight in layer]
    for weight in flat:
        weight.requires_grad_(True)
        weight.grad = None
    try:
        for example in examples:
            tokens = torch.tensor((*example.prompt_ids, *example.answer_ids))
            rows = rows_pass(target, tokens, torch.arange(len(tokens)), causal(len(tokens)))
            if adapter is None:
                loss = next_token_loss(target, rows, example)
            else:
                loss = streams_loss(target, adapter, rows, example)
            (loss / len(examples)).backward()
        return [
            sum(float(w.grad.double().square().sum()) for w in layer if w.grad is not None) ** 0.5 for layer in weights
        ]
    finally:
        for weight in flat:
            weight.requires_grad_(False)
            weight.grad = None


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load(quantize="none", pack=False, dtype="float32")
    decoder = loaded.target.decoder
    decoder.requires_grad_(False)
    trained = streams_of(loaded)
    torch.manual_seed(0)
    paper = StreamConfig(num_streams=trained.shape.num_streams, num_stream_layers=min(4, decoder.config.num_layers))
    fresh = StreamAdapter(decoder.config, paper).requires_grad_(False)
    examples = [example for example in setup.answers() if len(example.answer_ids) > 2]
    norms = {}
    for name, adapter in (("next token", None), ("fresh streams", fresh), ("trained streams", trained)):
        setup.report(name)
        norms[name] = rounded(gradient_norms(decoder, examples, adapter), 6)
    return {
        "norms": norms,
        "starts": {"fresh streams": fresh.start, "trained streams": trained.start},
        "texts": len(examples),
        "positions": sum(len(_places(example)[1]) for example in examples),
    }


def _share(result: Result, name: str) -> float:
    """The streams' norm over the layers in which no stream runs, as a share of all layers'."""
    squares = [norm**2 for norm in result["norms"][name]]
    return float((sum(squares[: result["starts"][name]]) / (sum(squares) or 1.0)) ** 0.5)


def _ours(result: Result) -> str:
    told = (f"{name}: {_share(result, name):.0%} of the norm below their layers" for name in result["starts"])
    return "; ".join(told)


def _table(result: Result) -> Table:
    norms = result["norms"]
    layers = len(norms["next token"])
    rows: list[list[object]] = [[layer, *(f"{each[layer]:.4f}" for each in norms.values())] for layer in range(layers)]
    return ("layer", *norms), rows


def _chart(result: Result) -> Chart:
    lines = [Line(name, list(range(len(norms))), norms) for name, norms in result["norms"].items()]
    return Chart("Gradient norms of the target's MLPs", "layer", "L2 norm of the gradient", lines, log=True)


STUDY = Study(
    name="gradients",
    papers="ACL figure 6",
    title="Gradient norms by layer",
    measures="The L2 norm of the gradient of the target's MLP weights, by layer, over the mean loss of some "
    "completions: of the next token, of fresh streams in the paper's configuration (the start of training), and of "
    "the adapter's streams (trained). Nothing is trained.",
    paper="no values in the text; at the start, gradients are strong in early and middle layers as "
    "well as in late ones; at step 5,000 they are more selective",
    differs="in lossless mode the target is frozen and these gradients are not used; the trained adapter was trained "
    "on that frozen target, and is of another configuration than the fresh one",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="own",
    limit=6,
)
