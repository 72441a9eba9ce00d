"""Captured steps, and that a GPU's tensors are not mixed with the host's: on a device that is ``pretended``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

import pretended
from anabranch.decoding.engine import Engine, Step
from anabranch.drafting.combined import CombinedDrafter
from anabranch.drafting.drafter import Drafter
from anabranch.methods.none import NoDrafter
from anabranch.methods.prompt_lookup import LookupSettings, PromptLookupDrafter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model import graphs
from anabranch.model.backends import GraphBackend
from anabranch.model.decoder import Decoder
from anabranch.model.graphs import Capture, Graphs, capture_for, span_bucket, width_bucket
from anabranch.sampling import SamplingParams
from pretended import CUDA, there
from small import CASES, RICH, decode, request, small, small_adapter


def drafted(target: Decoder, config: StreamConfig = RICH, **options: Any) -> StreamDrafter:
    tree = options.pop("tree", StreamSettings(nodes=10, k=4))
    return StreamDrafter(target, small_adapter(target, config), replace(tree, **options))


TOP = StreamConfig(num_streams=2, num_stream_layers=2, adapter_rank=3, context_top=4)
DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "prompt_lookup": lambda target: PromptLookupDrafter(LookupSettings(tokens="5")),
    "ride": lambda target: drafted(target, placement="ride"),
    "trail": lambda target: drafted(target, placement="trail"),
    "context_top": lambda target: drafted(target, TOP, placement="ride"),
    "pruned": lambda target: drafted(target, prune=5),
    "product": lambda target: drafted(target, tree=StreamSettings(tree="product", k=2)),
    "combined": lambda target: CombinedDrafter([drafted(target), PromptLookupDrafter()], nodes=10),
}
RAGGED = [request(n, n, new) for n, new in ((9, 25), (1, 5), (14, 25), (4, 11), (7, 20))]


def drafts_of(steps: list[list[Step]]) -> list[list[list[int]]]:
    return [[step.tree.tokens.tolist() for step in row] for row in steps]


# every drafter on one family, some for a single row too; riding or trailing streams on each of the others, in turn
OTHERS = [case for case in sorted(CASES) if case != "llama"]
CHOSEN = [
    *product(("llama",), DRAFTERS, (3,)),
    *product(("llama",), ("ride", "trail", "combined"), (1,)),
    *((case, how, 3) for case, how in zip(OTHERS, cycle(("ride", "trail")))),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "name", "rows"), CHOSEN)
def test_captured_steps_give_what_the_host_gives(
    case: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = decode(small(case), RAGGED)
    # where streams trail of themselves differs with the device
    _, before = decode(small(case), RAGGED, DRAFTERS[name](small(case)), rows=rows)
    monkeypatch.setattr(graphs, "SPAN", 16)  # so that a text outgrows what was captured
    with pretended.cuda():
        target = there(small(case))
        tokens, found = decode(target, RAGGED, DRAFTERS[name](target), rows=rows)
        assert tokens == wanted
        assert drafts_of(found) == drafts_of(before), "so that as many are accepted"


SAMPLING = {
    "top_k": SamplingParams(temperature=0.8, top_k=9, seed=3),
    "top_p": SamplingParams(temperature=1, top_p=0.8),
    "whole": SamplingParams(temperature=1, seed=5),
    "penalty": SamplingParams(repetition_penalty=1.3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ride", "trail", "combined"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampling(name: str, sampling: str) -> None:
    requests = [request(n, n, 20, sampling=SAMPLING[sampling], log_probs=True) for n in (9, 4)]
    wanted, _ = decode(small(), requests)
    _, before = decode(small(), requests, DRAFTERS[name](small()), rows=2)
    with pretended.cuda():
        target = there(small())
        drafter = DRAFTERS[name](target)
        tokens, found = decode(target, requests, drafter, rows=2)
        assert tokens == wanted
        assert drafts_of(found) == drafts_of(before)
        streams = drafter.parts[0] if isinstance(drafter, CombinedDrafter) else drafter
        assert streams.tree.graphs.captured > 0, "drafts that know the noise are captured too"


def run(target: Decoder, new: int = 30) -> Engine:
    engine = Engine(target, DRAFTERS["trail"](target), capacity=90)
    engine.add(request(9, 0, new))
    list(engine.run())
    return engine


@pytest.mark.thorough
def test_a_single_call_is_not_captured_and_graphs_outlive_a_row() -> None:
    with pretended.cuda():
        engine = Engine(there(small()), NoDrafter(), capacity=90)
        graphs = engine.cache.graphs
        engine.add(request(9, 0, 1))
        engine.step()
        assert graphs.captured == 0  # the prompt's chunk and one step: two shapes, each once
        engine.add(request(9, 1, 30))
        list(engine.run())
        before = graphs.captured
        assert before > 0
        engine.add(request(9, 2, 30))
        list(engine.run())
        assert graphs.captured == before


@pytest.mark.thorough
def test_a_graph_that_fails_or_differs_is_not_used() -> None:
    wanted, _ = decode(small(), [request(9, 0, 30)])

    def fails(compute: Any, inputs: tuple[Tensor, ...]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def differs(compute: Any, inputs: tuple[Tensor, ...]) -> Any:
        replay, outputs = pretended.Capture(CUDA)(compute, inputs)
        return replay, tuple(x + 1 for x in outputs)

    captures: list[tuple[Capture, str]] = [(fails, "not permitted when stream is capturing$"), (differs, "differs")]
    for capture, why in captures:
        with pretended.cuda():
            target = there(small())
            target.backend, drafter = GraphBackend(capture), DRAFTERS["trail"](target)
            with pytest.warns(UserWarning, match=why) as seen:
                tokens, _ = decode(target, [request(9, 0, 30)], drafter)
        assert tokens == wanted
        assert len(seen) == 2  # once for the cache, once for the drafts


def test_operations_that_a_graph_cannot_capture_are_refused() -> None:
    """The pretended device notices each of them."""
    outside = torch.ones(3)
    reads: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * float(x[0]),
        lambda x: x + outside.to(CUDA),
        lambda x: x[x > 0],
        lambda x: x.cpu().to(CUDA),
        lambda x: x + torch.tensor(2.0, device=CUDA),
        lambda x: x[torch.tensor([0, 1])],
    ]
    with pretended.cuda(), torch.inference_mode():
        x = torch.ones(3, device=CUDA)
        with pytest.raises(RuntimeError, match="same device"):
            x + outside
        for compute in reads:
            assert compute(x).device == CUDA
            kept, call = Graphs(), lambda x, compute=compute: (compute(x),)
            kept.run(capture_for(CUDA), "key", call, (x,), CUDA)
            with pytest.warns(UserWarning, match="CUDA graphs are off"):
                kept.run(capture_for(CUDA), "key", call, (x,), CUDA)


def test_outside_of_inference_nothing_is_captured() -> None:
    with pretended.cuda():
        kept, x, capture = Graphs(), torch.ones(2, device=CUDA), capture_for(CUDA)
        for _ in range(3):
            (y,) = kept.run(capture, "twice", lambda x: (2 * x,), (x,), CUDA)
            assert y.tolist() == [2.0, 2.0]
        assert kept.captured == 0


def test_the_oldest_graphs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    with pretended.cuda(), torch.inference_mode():
        kept, x, capture = Graphs(), torch.full((2,), 5.0), capture_for(CUDA)
        for factor in (2, 2, 3, 3, 4, 4, 4, 2):
            (y,) = kept.run(capture, factor, lambda x, factor=factor: (factor * x,), (x,), CUDA)
            assert y.tolist() == [5.0 * factor] * 2
        assert kept.captured == 1


def test_buckets() -> None:
    assert [width_bucket(n, 1) for n in (1, 2, 3, 9, 32, 33, 256, 257)] == [1, 8, 8, 16, 32, 64, 256, None]
    assert [width_bucket(n, 4) for n in (1, 2, 3, 9)] == [1, 2, 4, 16]
    assert [width_bucket(n, 5) for n in (8, 9, 12, 13)] == [8, 12, 12, 16]  # 60 rows are fused, 80 are not
    assert width_bucket(200, 8) is None
    for span in range(1, 40_000, 7):
        read = span_bucket(span, 100_000)
        assert span <= read <= max(256, 1.25 * span + 1, span + 255)
        assert span_bucket(span, span + 3) <= span + 3
    assert len({span_bucket(span, 100_000) for span in range(1, 40_000)}) < 32
    wide = [span_bucket(span, 100_000, skips=True) for span in (1, 1024, 1025, 70_000)]
    assert wide == [1024, 1024, 4096, 100_000]


def test_no_warning_where_all_is_well() -> None:
    with warnings.catch_warnings(), pretended.cuda():
        warnings.simplefilter("error")
        assert run(there(small())).cache.graphs.captured >= 2
