"""ACL figure 5: how alike stream states and the true future states of the main stream are, layer by layer.

Stream j of position t predicts token t + 1 + j, as the main stream at t + j does once the true tokens are known. So at
the entry of every layer from N - N_s on, stream j of t is compared with the main row of t + j; after the last layer,
both after the last norm.

P positions, S streams, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.learning.examples import Batch, Example
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.objective import StreamObjective
from anabranch.model.decoder import Decoder
from studies.base import Chart, Line, Result, Setup, Study, Table, rounded, streams_of
from studies.forward import Rows, causal, rows_pass

__all__ = ["STUDY", "Similarity", "future_rows", "heads_similarity", "stream_states", "streams_similarity"]


class Similarity:
    """Mean cosine similarities by layer and predictor, over positions of several texts."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count: Tensor | None = None

    def add(self, states_LPSD: Tensor, true_LPSD: Tensor, inside_PS: Tensor) -> None:
        """Add the positions and predictors ``inside`` the text."""
        cosine = F.cosine_similarity(states_LPSD.float(), true_LPSD.float(), dim=-1)
        found = torch.where(inside_PS, cosine, torch.zeros_like(cosine)).sum(1)
        self.total = found if self.total is None else self.total + found
        self.count = inside_PS.sum(0) if self.count is None else self.count + inside_PS.sum(0)

    def means(self) -> list[list[float]]:
        """A list of layers for each predictor."""
        assert self.total is not None
        assert self.count is not None
        return [rounded(layers) for layers in (self.total / self.count.clamp(min=1)).T.tolist()]


def future_rows(entries: Rows, start: int, positions_P: Tensor, streams: int, *, ahead: bool = True) -> Tensor:
    """The main rows of t + j at the entry of layers ``start`` to L, the last after the norm [L - start + 1, P, S, D].

    ``ahead=False`` gives the row of t itself for every stream: what a stream that stayed a copy of it would score.
    """
    step = torch.arange(1, streams + 1) if ahead else torch.zeros(streams, dtype=torch.long)
    levels = torch.stack([*(x[0] for x in entries.entries[start:-1]), entries.hidden_1RD[0]])
    return levels[:, (positions_P[:, None] + step).clamp(max=levels.shape[1] - 1)]


@contextmanager
def _entering(target: Decoder, start: int, found: list[Tensor]) -> Iterator[None]:
    """Append the input of every block from ``start`` on to ``found``."""
    hooks = [block.register_forward_pre_hook(lambda _, args: found.append(args[0])) for block in target.blocks[start:]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stream_states(
    target: Decoder, adapter: StreamModule, example: Example, positions_P: Tensor, *, riding: bool = False
) -> Tensor:
    """Stream states at the entry of every stream layer, the last after the norm [N_s + 1, P, S, D].

    ``riding``: the streams are not conditioned on the token emitted at their node, as in the paper.
    """
    objective, batch = StreamObjective(target, adapter), Batch.of([example])
    frozen, places = objective.freeze(batch), positions_P[None]
    found: list[Tensor] = []
    with _entering(target, adapter.start, found):
        last = objective.states(frozen, batch.tokens_BT, places, torch.full_like(places, int(riding)).bool())
    entries = [x.view(len(positions_P), adapter.shape.num_streams, -1) for x in found]
    return torch.stack([*entries, last[0]])


def _places(example: Example, ahead: int) -> tuple[Tensor, Tensor]:
    """Positions from the last prompt token on, and which of their ``ahead`` future rows are in the text [P, S]."""
    positions = torch.arange(len(example.prompt_ids) - 1, len(example) - 1)
    return positions, positions[:, None] + torch.arange(1, ahead + 1) < len(example)


def _true_rows(target: Decoder, example: Example) -> Rows:
    tokens = torch.tensor((*example.prompt_ids, *example.answer_ids))
    return rows_pass(target, tokens, torch.arange(len(tokens)), causal(len(tokens)))


@torch.no_grad()
def streams_similarity(target: Decoder, adapter: StreamModule, examples: list[Example]) -> dict[str, Any]:
    """Cosine by stream and layer: of streams as decoding uses them, of riding ones, and of copies of the main row."""
    kinds = {"streams": Similarity(), "copy of the main stream": Similarity()}
    if adapter.root is not None:
        kinds["riding streams"] = Similarity()
    for example in examples:
        positions_P, inside_PS = _places(example, adapter.shape.num_streams)
        rows = _true_rows(target, example)
        true = future_rows(rows, adapter.start, positions_P, adapter.shape.num_streams)
        for name, total in kinds.items():
            if name == "copy of the main stream":
                states = future_rows(rows, adapter.start, positions_P, adapter.shape.num_streams, ahead=False)
            else:
                states = stream_states(target, adapter, example, positions_P, riding=name == "riding streams")
            total.add(states, true, inside_PS)
    layers = [*range(adapter.start, target.config.num_layers), target.config.num_layers]
    return {"layers": layers, "cosine": {name: total.means() for name, total in kinds.items()}}


@torch.no_grad()
def heads_similarity(target: Decoder, objective: Any, examples: list[Example]) -> list[float]:
    """Cosine of each draft head's state and the true state after the last norm, for heads on the last hidden state."""
    total = Similarity()
    for example in examples:
        positions_P, inside_PS = _places(example, objective.predictors)
        batch = Batch.of([example])
        frozen = objective.freeze(batch)
        states = objective.states(frozen, batch.tokens_BT, positions_P[None])
        given = objective.conditioned(states, batch.tokens_BT, positions_P[None])
        true = future_rows(_true_rows(target, example), target.config.num_layers, positions_P, objective.predictors)
        total.add(given, true, inside_PS)
    return [layers[0] for layers in total.means()]


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load(quantize="none", pack=False, dtype="float32")
    target, examples = loaded.target.decoder, setup.answers()
    found = streams_similarity(target, streams_of(loaded), examples)
    heads: dict[str, list[float]] = {}
    for label, each in setup.labelled(loaded.target).items():
        trained = each.method.trained
        if isinstance(each.module, StreamModule) or trained is None:
            continue
        setup.report(f"heads of {label}")
        recipe = trained.training.recipe()
        objective: Any = trained.learn(target, each.module, recipe, frozen=target)
        heads[label] = heads_similarity(target, objective, examples)
    tokens = sum(len(example.answer_ids) for example in examples)
    return {**found, "heads": heads, "texts": len(examples), "tokens": tokens}


def _ours(result: Result) -> str:
    last = {name: [layers[-1] for layers in streams] for name, streams in result["cosine"].items()}
    last |= {f"heads of {name}": values for name, values in result["heads"].items()}
    shown = (f"{name} {', '.join(f'{value:.2f}' for value in values[:2])}" for name, values in last.items())
    first = result["cosine"]["streams"][0]
    return f"the first two after the last norm: {'; '.join(shown)}; stream 1 at entry {first[0]:.2f}"


def _table(result: Result) -> Table:
    titles = ["states", "stream", *(f"layer {i}" for i in result["layers"][:-1]), "after the norm"]
    rows: list[list[object]] = []
    for name, streams in result["cosine"].items():
        rows += [[name, j, *(f"{x:.2f}" for x in layers)] for j, layers in enumerate(streams, 1)]
    blank = ["-"] * (len(result["layers"]) - 1)
    for name, values in result["heads"].items():
        rows += [[f"heads of {name}", j, *blank, f"{value:.2f}"] for j, value in enumerate(values, 1)]
    return titles, rows


def _chart(result: Result) -> Chart:
    layers, cosine = result["layers"], result["cosine"]
    lines = [Line(f"stream {j}", layers, values) for j, values in enumerate(cosine["streams"][:6], 1)]
    lines.append(Line("copy of the main stream (1)", layers, cosine["copy of the main stream"][0], faint=True))
    heads: Mapping[str, list[float]] = result["heads"]
    lines += [Line(f"{name}, head 1", layers[-1:], values[:1]) for name, values in list(heads.items())[:3]]
    return Chart("Streams and the true future states of the main stream", "layer", "cosine similarity", lines)


STUDY = Study(
    name="cosine",
    papers="ACL figure 5",
    title="Cosine similarity of stream states to true future states",
    measures="The cosine of stream j's state at position t and the main stream's state at t + j, which has seen the "
    "true tokens, at the entry of each stream layer, and after the last norm. Texts are the target's own greedy "
    "completions. As a reference, the main stream's state at t in place of the stream. Draft heads given by "
    "`--adapter` have one state, after the last layer.",
    paper="no values in the text; similarity rises with the layers, and is higher than Medusa's",
    differs="another target and another adapter, whose streams are conditioned on the emitted token; the paper's are "
    "not, like those in the rows of riding streams",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="spec_bench",
    limit=26,
)
