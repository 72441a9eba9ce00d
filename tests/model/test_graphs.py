"""Recorded steps. There is no GPU here, so a tape stands for the CUDA graph: it too repeats the same operations on the
same memory and knows of numbers and lengths only what was true when it was made. What it does not have are CUDA's own
rules for memory and streams.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anabranch.drafters.base import Drafter
from anabranch.drafters.combined import CombinedDrafter
from anabranch.drafters.none import NoDrafter
from anabranch.drafters.prompt_lookup import PromptLookupDrafter
from anabranch.drafters.streams import StreamDrafter
from anabranch.engine import Engine
from anabranch.model import graphs
from anabranch.model.decoder import Decoder
from anabranch.model.graphs import Graphs, Recorder, span_bucket, width_bucket
from anabranch.sampling import SamplingParams
from anabranch.streams.config import StreamConfig
from anabranch.streams.draft import DraftOptions
from small import CASES, RICH, decode, request, small, small_adapter

aten = torch.ops.aten
# what brings a number to the host, or one of the host's into a recording
FORBIDDEN = {
    aten._local_scalar_dense,
    aten.item,
    aten.nonzero,
    aten.masked_select,
    aten.lift_fresh,
    aten.lift_fresh_copy,
}
CPU = torch.device("cpu")


class Tape(TorchDispatchMode):
    """Records operations, their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in FORBIDDEN:
            raise RuntimeError(f"{func} cannot be recorded")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def repeat(self, outputs: tuple[Tensor, ...]) -> None:
        new: dict[int, Tensor] = {}

        def current(x: Any) -> Any:
            return new.get(id(x), x) if isinstance(x, Tensor) else x

        for func, args, kwargs, out in self.calls:
            found = func(*tree_map(current, args), **tree_map(current, kwargs))
            new.update(
                (id(old), fresh)
                for old, fresh in zip(tree_leaves(out), tree_leaves(found), strict=True)
                if isinstance(old, Tensor)
            )
        for place in outputs:
            place.copy_(current(place))


def record(compute: Any, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    with Tape() as tape:
        outputs = tuple(x.clone() for x in compute(*inputs))  # places of their own
    return lambda: tape.repeat(outputs), outputs


def drafted(target: Decoder, config: StreamConfig = RICH, **options: Any) -> StreamDrafter:
    tree = options.pop("tree", DraftOptions(nodes=10, k=4))
    return StreamDrafter(target, small_adapter(target, config), tree, **options)


TOP = StreamConfig(num_streams=2, num_stream_layers=2, adapter_rank=3, context_top=4)
DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "prompt_lookup": lambda target: PromptLookupDrafter(tokens=5),
    "ride": lambda target: drafted(target, placement="ride"),
    "trail": lambda target: drafted(target, placement="trail"),
    "context_top": lambda target: drafted(target, TOP, placement="ride"),
    "pruned": lambda target: drafted(target, prune=5),
    "product": lambda target: drafted(target, tree=DraftOptions(tree="product", k=2)),
    "shortlist": lambda target: drafted(target, tree=DraftOptions(nodes=10, k=4, shortlist=8)),
    "combined": lambda target: CombinedDrafter([drafted(target), PromptLookupDrafter()], nodes=10),
}
RAGGED = [request(n, n, new) for n, new in ((9, 40), (1, 5), (14, 40), (4, 11), (7, 30))]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name)
        for case in sorted(CASES)
        for name in DRAFTERS
        if case == "llama" or name in ("none", "ride", "trail")
    ],
)
def test_recorded_steps_say_what_unrecorded_ones_say(case: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = small(case)
    wanted, _ = decode(target, RAGGED)
    unrecorded = [decode(target, RAGGED, DRAFTERS[name](target), rows=rows)[1] for rows in (1, 3)]
    monkeypatch.setattr(graphs, "SPAN", 16)  # so that a text outgrows what was recorded
    monkeypatch.setattr(target, "recorder", record)
    for rows, steps in zip((1, 3), unrecorded, strict=True):
        tokens, found = decode(target, RAGGED, DRAFTERS[name](target), rows=rows)
        assert tokens == wanted
        # drafts are the same too, so that as many are accepted
        for before, now in zip(steps, found, strict=True):
            assert [step.tree.tokens.tolist() for step in before] == [step.tree.tokens.tolist() for step in now]


@pytest.mark.parametrize("name", ["ride", "trail", "combined"])
def test_sampling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sampling = small(), SamplingParams(temperature=0.8, top_k=9, seed=3)
    requests = [request(n, n, 20, sampling=sampling) for n in (9, 4)]
    wanted, _ = decode(target, requests)
    monkeypatch.setattr(target, "recorder", record)
    assert decode(target, requests, DRAFTERS[name](target), rows=2)[0] == wanted


def run(target: Decoder, new: int = 30) -> Engine:
    engine = Engine(target, DRAFTERS["trail"](target), capacity=90)
    engine.add(request(9, 0, new))
    list(engine.run())
    return engine


def test_what_is_done_once_is_not_recorded_and_recordings_outlive_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = small(), []

    def counted(compute: Any, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        made.append(compute)
        return record(compute, inputs)

    monkeypatch.setattr(target, "recorder", counted)
    engine = Engine(target, NoDrafter(), capacity=90)
    engine.add(request(9, 0, 1))
    engine.step()
    assert not made  # the prompt's chunk and one step: two shapes, each once
    engine.add(request(9, 1, 30))
    list(engine.run())
    before = len(made)
    assert 0 < before == engine.cache.graphs.recorded
    engine.add(request(9, 2, 30))
    list(engine.run())
    assert len(made) == before


def test_a_recording_that_fails_or_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    wanted, _ = decode(target, [request(9, 0, 30)])

    def fails(compute: Any, inputs: tuple[Tensor, ...]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def differs(compute: Any, inputs: tuple[Tensor, ...]) -> Any:
        repeat, outputs = record(compute, inputs)
        return repeat, tuple(x + 1 for x in outputs)

    recorders: list[tuple[Recorder, str]] = [(fails, "not permitted when stream is capturing$"), (differs, "differs")]
    for recorder, why in recorders:
        monkeypatch.setattr(target, "recorder", recorder)
        with pytest.warns(UserWarning, match=why) as seen:
            tokens, _ = decode(target, [request(9, 0, 30)], DRAFTERS["trail"](target))
        assert tokens == wanted
        assert len(seen) == 2  # once for the cache, once for the drafts


def test_outside_of_inference_nothing_is_recorded() -> None:
    kept, x = Graphs(), torch.ones(2)
    for _ in range(3):
        (y,) = kept.run(record, "twice", lambda x: (2 * x,), (x,), CPU)
        assert y.tolist() == [2.0, 2.0]
    assert kept.recorded == 0


@torch.inference_mode()
def test_the_oldest_recordings_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    kept = Graphs()
    for factor in (2, 2, 3, 3, 4, 4, 4, 2):
        (y,) = kept.run(record, factor, lambda x, factor=factor: (factor * x,), (torch.full((2,), 5.0),), CPU)
        assert y.tolist() == [5.0 * factor] * 2
    assert kept.recorded == 1


def test_buckets() -> None:
    assert [width_bucket(n, 1) for n in (1, 2, 3, 9, 32, 33, 256, 257)] == [1, 2, 4, 12, 32, 48, 256, None]
    assert width_bucket(200, 8) is None
    for span in range(1, 40_000, 7):
        read = span_bucket(span, 100_000)
        assert span <= read <= max(256, 1.25 * span + 1, span + 255)
        assert span_bucket(span, span + 3) <= span + 3
    assert len({span_bucket(span, 100_000) for span in range(1, 40_000)}) < 32


def test_no_warning_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    monkeypatch.setattr(target, "recorder", record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(target).cache.graphs.recorded >= 2
