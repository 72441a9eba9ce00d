"""On a real CUDA GPU: logits, captured graphs, certification, a training step. ``pytest -m cuda`` runs these.

They passed on an H200 on 2026-11-26 (docs/gpu.md).

What can be tested without a GPU is in ``test_cuda.py`` and ``model/test_graphs.py``, on a pretended device.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from anabranch.certify import certify
from anabranch.decoding.engine import Engine
from anabranch.decoding.scheduler import Scheduler
from anabranch.learning.examples import Batch, Example
from anabranch.methods import make_drafter
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.model.backends import TorchBackend, backend_for
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import CASES, as_target, logits_of, prompt, request, small, small_adapter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU that PyTorch can use"),
]
SPECS = ("none", "prompt_lookup", "streams:tree=6", "streams:tree=6,placement=ride", "streams:tree=8+prompt_lookup")


def on_gpu(case: str = "llama", dtype: torch.dtype = torch.float32, *, captured: bool = True) -> Decoder:
    """A copy of a small target on the GPU."""
    target = copy.deepcopy(small(case)).to("cuda", dtype)
    target.backend = backend_for(target.device) if captured else TorchBackend()
    return target


@torch.inference_mode()
def scores(target: Decoder) -> torch.Tensor:
    """Logits [B, N, V] of ragged trees behind prompts of different lengths."""
    cache = Cache(target.config, rows=2, capacity=64, dtype=target.dtype, device=target.device)
    for slot, length in enumerate((9, 4)):
        cache.add_row()
        target(Inputs.of_prompt(prompt(length, slot)), cache, slots=slice(slot, slot + 1), need="hidden")
        cache.commit([range(length)])
    trees = [DraftTree.from_paths(5, [[3, 6], [3, 7], [4, 6], [4, 7]]), DraftTree.chain(8, [9, 10])]
    return logits_of(target(Inputs.of_trees(trees), cache)).float().cpu()


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_are_those_of_the_cpu(case: str) -> None:
    torch.testing.assert_close(scores(on_gpu(case)), scores(small(case)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_logits_are_near(dtype: torch.dtype) -> None:
    wanted = scores(small())
    assert (scores(on_gpu(dtype=dtype)) - wanted).abs().mean() < 0.1 * wanted.std()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_captured_graphs_change_nothing(spec: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    asked = [request(6, n, 40, sampling=sampling) for n in range(3)]
    found = []
    for captured in (True, False):
        target = on_gpu(captured=captured)
        engine = Engine(target, make_drafter(spec, target, small_adapter(target)), rows=3, capacity=96)
        texts: dict[int, list[int]] = {engine.add(each): [] for each in asked}
        for step in engine.run():
            texts[step.row] += step.tokens
        assert (engine.cache.graphs.captured > 0) == captured
        found.append(list(texts.values()))
    assert found[0] == found[1]


def test_rows_of_different_drafters_and_sampling_share_passes() -> None:
    target = on_gpu()
    adapter = small_adapter(target)
    scheduler = Scheduler(target)
    asked = [request(5 + n, n, 20, sampling=SamplingParams(temperature=0.8 * (n % 2), seed=n)) for n in range(5)]
    specs = ("none", "prompt_lookup", "streams:tree=6", "streams:tree=auto", "streams:tree=8+prompt_lookup")
    tickets = [
        scheduler.submit(each, make_drafter(spec, target, adapter)) for each, spec in zip(asked, specs, strict=True)
    ]
    while scheduler.busy:
        scheduler.tick()
    plain = make_drafter("none", target)
    for ticket in tickets:
        assert ticket.error is None
        alone = Scheduler(target, prefix_bytes=0)
        assert ticket.emitted == [t for step in alone.steps(alone.submit(ticket.request, plain)) for t in step.tokens]


@pytest.mark.parametrize("spec", SPECS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_drafter_is_certified(spec: str, dtype: torch.dtype) -> None:
    target = on_gpu(dtype=dtype)
    adapter = small_adapter(target).to(dtype)
    found = certify(as_target(target), [adapter], spec, [prompt(5 + n, n) for n in range(6)], max_new_tokens=24)
    allowed = {"equal"} if dtype == torch.float32 else {"equal", "tie"}
    assert {each.verdict for each in found} <= allowed


def test_a_training_step_is_that_of_the_cpu() -> None:
    batch = Batch.of([Example(tuple(prompt(p, p)), tuple(prompt(a, 30 + a))) for p, a in ((5, 9), (3, 14))])
    gradients, losses = [], []
    for target in (small(), on_gpu()):
        adapter = small_adapter(target).train().requires_grad_(True)
        objective = StreamObjective(target, adapter, replace(LossOptions(), soft=0.5), segment=6)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            frozen, total = objective.freeze(batch), 0.0
            for segment in objective.segments(batch):
                loss = objective.loss(batch, frozen, segment).loss
                loss.backward()
                total += float(loss.detach())
            if not len(losses) % 3:
                gradients.append({name: p.grad.cpu() for name, p in adapter.named_parameters() if p.grad is not None})
            optimizer.step()
            losses.append(total)
    assert losses[2] < losses[0], "the loss falls"
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-2)
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()) + 1e-7)
