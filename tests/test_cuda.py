"""Public calls and commands on a ``pretended`` GPU: no tensor of the host strays into it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import anabranch
import pretended
from anabranch.bench.shapes import measure_shape
from anabranch.cli import app
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import DeviceError
from anabranch.learning.examples import Batch, Example
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.model.backends import TorchBackend
from anabranch.tune.fit import fit
from pretended import CUDA, there
from small import as_target, decode, prompt, request, small, small_adapter
from toy_text import ToyFolders

TEXT = "the thing that the"


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("anabranch.bench.machine.SIDE", {"cuda": 64})
    monkeypatch.setattr("anabranch.bench.machine.LEAST", {"cuda": 2**20})
    with pretended.cuda(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="CUDA graphs are off")
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_generate(toys: ToyFolders, quantize: str) -> None:
    there_, here = (
        anabranch.load(toys.model, adapter=toys.adapter, device=device, dtype="float32", quantize=quantize)
        for device in ("cuda", "cpu")
    )
    assert str(there_.target.decoder.device) == "cuda:0"
    for drafter in ("none", "streams:tree=auto,nodes=6+prompt_lookup"):
        for temperature in (0.0, 1.0):
            texts = [
                model.generate(TEXT, max_new_tokens=12, drafter=drafter, temperature=temperature, seed=1).token_ids
                for model in (there_, here)
            ]
            assert texts[0] == texts[1]


@pytest.mark.thorough
@pytest.mark.usefixtures("_cuda")
def test_commands(toys: ToyFolders, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [json.dumps({"prompt": f"the thing {i}", "source": "toy", "licence": "CC0-1.0"}) for i in range(3)]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    of = ["--model", str(toys.model), "--device", "cuda", "--max-new-tokens", "10"]
    adapted = [*of, "--adapter", str(toys.adapter)]
    for arguments in (
        ["generate", TEXT, *adapted, "--compare"],
        ["certify", *adapted, "--prompts", str(prompts)],
        ["bench", *adapted, "--suite", str(prompts), "--method", "streams:tree=6", "--out", str(tmp_path / "result")],
        ["train", "answers", *of, "--prompts", str(prompts), "--out", str(answers)],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (arguments[:2], done.output, done.exception)
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.thorough
@pytest.mark.usefixtures("_cuda")
def test_steps_of_a_shape() -> None:
    found = measure_shape("135m", dtype=torch.bfloat16, device=CUDA, widths=(1, 4), contexts=(16,), nodes=4, rounds=1)
    assert {times.kind for times in found.times} == {"plain", "verify 1", "verify 4", "streams"}


@pytest.mark.thorough
@pytest.mark.usefixtures("_cuda")
def test_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.tune.timing.WIDTHS", (1, 4))
    monkeypatch.setattr("anabranch.tune.timing.DRAFTS", (4,))
    target = there(small())
    target.backend = TorchBackend()  # ``model/test_graphs.py`` tests graphs, and they make hundreds of steps slow here
    found = fit(as_target(target), [small_adapter(target)], [prompt(5, 0)], max_new_tokens=8)
    assert found.measured > 0


@pytest.mark.thorough
@pytest.mark.usefixtures("_cuda")
def test_loss_and_evaluation() -> None:
    """The forward part of training: autograd cannot be run on a pretended device."""
    batch = Batch.of([Example(tuple(prompt(p, p)), tuple(prompt(a, 30 + a))) for p, a in ((5, 9), (3, 14))])
    losses = []
    for target in (small(), there(small())):
        objective = StreamObjective(target, small_adapter(target), LossOptions(soft=0.5), segment=6)
        frozen, losses_here = objective.freeze(batch), []
        for segment in objective.segments(batch):
            losses_here.append(objective.loss(batch, frozen, segment).loss.item())
        losses.append(losses_here)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.usefixtures("_cuda")
def test_there_is_one_device(toys: ToyFolders) -> None:
    with pytest.raises(DeviceError, match="cuda:0 to cuda:0"):
        anabranch.load(toys.model, device="cuda:1")


@pytest.mark.usefixtures("_cuda")
def test_short_prompts_join_in_one_tick() -> None:
    target = there(small())
    scheduler = Scheduler(target, rows=8, prefix_bytes=0)
    tickets = [scheduler.submit(request(5 + n, n, 12), NoDrafter()) for n in range(7)]
    scheduler.tick()  # the first one reads its prompt with its first step
    scheduler.tick()
    assert [len(ticket.emitted) for ticket in tickets] == [2, *[1] * 6]
    while scheduler.busy:
        scheduler.tick()
    wanted, _ = decode(small(), [request(5 + n, n, 12) for n in range(7)])
    assert [ticket.emitted for ticket in tickets] == wanted
