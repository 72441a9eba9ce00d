"""Initial weights of a training of streams: what the target's states and MLPs give, or another adapter's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.drafting.trained import adopt_shape, check_shape
from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.recipe import Recipe
from anabranch.learning.target import run_frozen
from anabranch.methods.streams.adapter import StreamAdapter, StreamModule
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.tuning import TextPass
from anabranch.model.decoder import Decoder
from anabranch.model.mlp import MLP

__all__ = ["adopt_streams", "begin_with", "mlp_rows", "reproduce_mlps", "scale_to_target", "start_streams"]

SAMPLE = 64  # tokens at most
RANKS = ("adapter_rank", "attention_rank", "mlp_rank")
STEP = 10.0  # a step moves a weight that is as large as it should be by the learning rate times this, times its size
ROWS = 4096  # of completions, that MLPs are approximated on
RIDGE = 1e-2  # of the inputs' mean square: directions that these rows do not fill stay at zero


def start_streams(target: Decoder, adapter: StreamAdapter, examples: Sequence[Example], frozen: Decoder) -> None:
    """Set weights and learning rates from what the target computes on ``examples``, which training uses.

    frozen  runs the layers below the streams', as in ``Trained.fresh``

    Raises CapabilityError for adapters in the place of an encoder-decoder target's MLPs: ``mlp_rows`` reads no source.
    """
    if target.encoder is not None and (adapter.config.stream_mlp == "adapter" or adapter.config.mode == "shared"):
        raise CapabilityError(
            "streams of encoder-decoder models keep the frozen target's MLP; use --stream-mlp mlp+adapter in mode "
            "lossless, as the recipes default-adapter and small"
        )
    scale_to_target(target, adapter)
    if adapter.config.stream_mlp == "adapter" and examples:
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # a resumed run begins with the same weights, whatever its threads
            reproduce_mlps(target, adapter, examples, frozen)
        finally:
            torch.set_num_threads(threads)


def scale_to_target(target: Decoder, adapter: StreamAdapter) -> None:
    """Let stream embeddings learn as fast as the states that they are added to are large.

    A step of Adam moves every weight by about the learning rate. The states at the entry of the top layers have root
    mean squares from about 1 to 20, so embeddings would need many thousands of steps to matter, and until then hardly
    tell the streams of a token apart.
    """
    if adapter.embeddings is None:
        return
    count = min(SAMPLE, target.config.max_positions)
    ids = torch.linspace(0, target.config.vocab_size - 1, count).long().tolist()
    source = None if target.encoder is None else target.encoder.some(SAMPLE)
    batch = Batch.of([Example(tuple(ids[:1]), tuple(ids[1:]), encoded=source)])
    x_BTD = run_frozen(target, batch, taps=(adapter.start,)).taps[adapter.start]
    # the median: the first token's state is often a thousand times as large
    adapter.learning_rates["embeddings"] = _rate(float(x_BTD.float().square().mean(-1).sqrt().median()))


def _rate(size: float) -> float:
    """The multiple of the learning rate for weights of this size; a power of 2, so that it is the same everywhere."""
    return max(1.0, 2.0 ** round(math.log2(STEP * size)))


class _Recorder(nn.Module):
    """A ``RowSide`` that adds nothing; it keeps the rows from ``first`` on that enter and leave the MLP."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.rows = first, (torch.empty(0), torch.empty(0))

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The fused projections."""
        return qkv(h_BRD)  # type: ignore[no-any-return]

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The output projection."""
        return out(a)  # type: ignore[no-any-return]

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part."""
        y_BRD: Tensor = mlp(h_BRD)
        self.rows = h_BRD[0, self.first :].float(), y_BRD[0, self.first :].float()
        return y_BRD


@torch.no_grad()
def reproduce_mlps(
    target: Decoder, adapter: StreamAdapter, examples: Sequence[Example], frozen: Decoder | None = None
) -> None:
    """Start adapters in the MLP's place as its approximation by their rank, on the completions' own main rows.

    Initialised to zero, they leave stream rows without what MLPs add: in the last layer, two thirds of the state.
    ``down`` has the directions of the MLP's input that its best linear approximation of this rank needs (reduced-rank
    regression), and ``up`` is least squares on what they give. ``up`` is as large as the states, and learns in
    proportion to its size.
    """
    for index, (x_MD, y_MD) in mlp_rows(target, adapter, examples, frozen).items():
        term = adapter.layer(index).mlp
        assert term is not None
        down = _directions(x_MD, y_MD, len(term.down))
        z_Mr = F.silu(x_MD @ down.T)
        term.down.copy_(down)
        term.up.copy_(_least_squares(z_Mr, y_MD, 1e-4))
        adapter.learning_rates[f"layers.{index - adapter.start}.mlp.up"] = _rate(float(term.up.square().mean().sqrt()))


@torch.no_grad()
def mlp_rows(
    target: Decoder, adapter: StreamModule, examples: Sequence[Example], frozen: Decoder | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """The inputs and outputs of the MLP of each of the streams' layers [M, D], of up to ROWS rows of completions.

    frozen  runs the layers below in the target's place
    """
    pairs: dict[int, list[tuple[Tensor, Tensor]]] = {i: [] for i in range(adapter.start, len(target.blocks))}
    count = 0
    for example in examples:
        if count >= ROWS:
            break
        batch, first = Batch.of([example]), len(example.prompt_ids) - 1
        run = TextPass(target, batch.tokens_BT.to(target.device))
        x = run_frozen(target, batch, frozen=frozen, taps=(adapter.start,)).taps[adapter.start]
        for index, rows_of_layer in pairs.items():
            recorder = _Recorder(first)
            x = run.layer(index, x, recorder)
            rows_of_layer.append(recorder.rows)
        count += len(example) - first
    return {index: (torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])) for index, rows in pairs.items()}


def _ridged(x_MD: Tensor, ridge: float) -> Tensor:
    """Second moments of rows [D, D], with this share of their mean square on the diagonal."""
    return x_MD.T @ x_MD / len(x_MD) + ridge * x_MD.square().mean() * torch.eye(x_MD.shape[1], device=x_MD.device)


def _least_squares(x_MD: Tensor, y_ME: Tensor, ridge: float) -> Tensor:
    """The W [E, D] for which W x is nearest to y."""
    solution: Tensor = torch.linalg.solve(_ridged(x_MD, ridge), x_MD.T @ y_ME / len(x_MD))
    return solution.T


def _directions(x_MD: Tensor, y_ME: Tensor, rank: int) -> Tensor:
    """The ``rank`` directions [rank, D] of x that the best linear approximation of y needs, each of length 1."""
    half = torch.linalg.cholesky(_ridged(x_MD, RIDGE))  # x = half z, and all directions of z are equally strong
    best = _least_squares(x_MD, y_ME, RIDGE) @ half
    strongest = torch.linalg.eigh(best.T @ best).eigenvectors[:, -rank:].flip(1)
    return F.normalize(torch.linalg.solve_triangular(half.T, strongest, upper=True).T, dim=1)


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
    check_shape(mine, theirs)
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
