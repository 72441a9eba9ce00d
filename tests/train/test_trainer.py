"""The training loop: the loss falls, and a run that was stopped anywhere ends as if it never had been."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.errors import FileError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import TrainOptions
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.support.interrupt import shielded
from anabranch.train.checkpoint import load_checkpoint
from anabranch.train.trainer import Progress, Trainer
from small import VOCABULARY, decode, request, small

CONFIG = StreamConfig(
    num_streams=3,
    num_stream_layers=2,
    stream_mlp="mlp+adapter",
    adapter_rank=3,
    pruning_rank=2,
    conditioning="path",
    conditioning_rank=6,
)
OPTIONS = TrainOptions(
    epochs=2.5, batch_tokens=90, lr=2e-2, warmup=2, segment=8, evaluate_every=4, evaluate_rows=2, checkpoint_every=3
)
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    asked = [request(2 + n % 7, n, 14) for n in range(26)]
    answers, _ = decode(small(), asked, rows=8)
    pairs = enumerate(zip(asked, answers, strict=True))
    return [Example(tuple(r.prompt_ids), tuple(a), "toy", n) for n, (r, a) in pairs]


def trainer(examples: list[Example], folder: Path, options: TrainOptions = OPTIONS, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    config = changes.get("config", CONFIG)
    adapter = StreamAdapter(small().config, config, torch.arange(0, VOCABULARY, 2))
    objective = StreamObjective(small(), adapter, changes.get("loss"), segment=options.segment)
    return Trainer(small(), adapter, objective, examples[4:], examples[:4], options, folder)


def weights(of: Trainer) -> Weights:
    return {name: value.clone() for name, value in of.module.state_dict().items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def nothing(_: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def whole(examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, dict[str, Any], Path]:
    """A run without interruption: its weights, its last evaluation, its folder."""
    folder = tmp_path_factory.mktemp("whole")
    run = trainer(examples, folder)
    evaluation = run.run(nothing)
    assert run.done == run.steps
    return weights(run), evaluation, folder


@pytest.mark.thorough
def test_the_loss_falls_and_streams_learn(examples: list[Example], tmp_path: Path) -> None:
    run = trainer(examples, tmp_path, replace(OPTIONS, epochs=16.0, lr=3e-2))
    run.held_out = run.examples  # so few examples teach nothing but themselves
    before, seen = run.evaluate(), []
    after = run.run(seen.append)
    assert sum(p.loss for p in seen[-6:]) < 0.75 * sum(p.loss for p in seen[:6])
    assert after["tree"] > before["tree"]
    assert after["top 1"][0] > before["top 1"][0]
    lengths = {"tree", "4 nodes", "8 nodes", "chain", "tree without conditioning"}
    assert set(after) == lengths | {"top 1", "top 8", "at least", "by source"}
    assert 1 <= after["4 nodes"] <= after["8 nodes"] <= after["tree"]
    assert [p.step for p in seen] == list(range(1, run.steps + 1))
    assert all(p.steps == run.steps and p.seconds_left >= 0 and len(p.accuracy) == 3 for p in seen)
    evaluated = [p.step for p in seen if p.evaluation is not None]
    # the last one too: the evaluation at the end is of other examples than those before it
    assert evaluated == [*range(4, run.steps, 4), run.steps]


def stop_at(step: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize(
    "step", [1, 4, 14, *(pytest.param(step, marks=pytest.mark.thorough) for step in (3, 6, 7, 12))]
)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    step: int, examples: list[Example], whole: tuple[Weights, dict[str, Any], Path], tmp_path: Path
) -> None:
    first = trainer(examples, tmp_path)
    assert step < first.steps
    with pytest.raises(KeyboardInterrupt):
        first.run(stop_at(step))
    assert json.loads((tmp_path / "checkpoint.json").read_text(encoding="utf-8"))["step"] == step
    second = trainer(examples, tmp_path)
    seen: list[Progress] = []
    assert second.run(seen.append) == whole[1]
    assert seen[0].step == step + 1
    assert same(weights(second), whole[0])
    assert second.seconds > first.seconds > 0


@pytest.mark.parametrize("where", ["forward", "update", "evaluation", "kill"])
def test_ctrl_c_at_the_worst_moment(
    where: str,
    examples: list[Example],
    whole: tuple[Weights, dict[str, Any], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = trainer(examples, tmp_path)
    calls = {"n": 0}

    def at_fourth(real: Callable[..., Any], before: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls["n"] += 1
            if calls["n"] == 4 and before:
                signal.raise_signal(signal.SIGINT)
            result = real(*args, **kwargs)
            if calls["n"] == 4:
                signal.raise_signal(signal.SIGINT)
            return result

        return wrapped

    if where == "forward":  # gradients of a part of the batch are lost, no update was made
        monkeypatch.setattr(first.objective, "loss", at_fourth(first.objective.loss, before=False))
    elif where == "update":  # while some weights have moved: held back until all have
        monkeypatch.setattr(first.optimizer, "step", at_fourth(first.optimizer.step, before=True))
    elif where == "evaluation":
        monkeypatch.setattr(first, "evaluate", lambda *_: signal.raise_signal(signal.SIGINT))
    else:  # nobody saves: the run goes back to step 3
        monkeypatch.setattr(first, "_save", lambda real=first._save: real() if first.done <= 3 else None)
    with pytest.raises(KeyboardInterrupt):
        first.run(stop_at(5) if where == "kill" else nothing)
    done = json.loads((tmp_path / "checkpoint.json").read_text(encoding="utf-8"))["step"]
    assert done == {"update": 4, "evaluation": 4, "kill": 3}.get(where, first.done)
    second = trainer(examples, tmp_path)
    second.run(nothing)
    assert same(weights(second), whole[0])


def test_the_log_has_every_step_once(
    examples: list[Example], whole: tuple[Weights, dict[str, Any], Path], tmp_path: Path
) -> None:
    def steps(folder: Path) -> list[int]:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["step"] for line in lines]

    first = trainer(examples, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.run(stop_at(9))
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as log:  # what a killed run leaves behind
        log.write('{"step": 12, "loss": 1.0}\n{"step": 1')
    trainer(examples, tmp_path).run(nothing)
    assert steps(tmp_path) == steps(whole[2])
    assert len(set(steps(tmp_path))) == len(steps(tmp_path))


def test_a_run_of_few_steps_leaves_a_log(examples: list[Example], tmp_path: Path) -> None:
    run = trainer(examples, tmp_path, replace(OPTIONS, epochs=0.5, evaluate_every=100))
    run.run(nothing)
    assert run.steps < 10
    line = json.loads((tmp_path / "log.jsonl").read_text(encoding="utf-8"))
    assert line["step"] == line["steps"] == run.steps


def test_resume_refuses_what_is_not_the_same_run(examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(examples, tmp_path).run(stop_at(2))
    both = r"started with lr 0.02 \(now 0.001\), decay 0.8 \(now 0.25\); .* over with --no-resume"
    with pytest.raises(FileError, match=both):
        trainer(examples, tmp_path, replace(OPTIONS, lr=1e-3, evaluate_every=100), loss=LossOptions(decay=0.25)).run(
            nothing
        )
    with pytest.raises(FileError, match=r"other examples .another file.* over with --no-resume"):
        trainer(examples[1:], tmp_path).run(nothing)
    with pytest.raises(FileError, match=r"started with conditioning path \(now parent\); .* --no-resume"):
        trainer(examples, tmp_path, config=replace(CONFIG, conditioning="parent")).run(nothing)
    # what does not touch the weights may change
    with pytest.raises(KeyboardInterrupt):
        trainer(examples, tmp_path, replace(OPTIONS, evaluate_every=100, checkpoint_every=1)).run(stop_at(3))
    anew = trainer(examples, tmp_path, replace(OPTIONS, lr=1e-3))
    seen: list[Progress] = []
    anew.run(seen.append, resume=False)
    assert seen[0].step == 1
    # a run that is done evaluates and changes nothing
    final = weights(anew)
    anew.run(stop_at(1))
    assert same(weights(anew), final)


def test_damaged_checkpoints(examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(examples, tmp_path).run(stop_at(2))
    path = tmp_path / "checkpoint.safetensors"
    data = path.read_bytes()
    for broken in (data[:-9], b"", b"rubbish of some length"):
        path.write_bytes(broken)
        with pytest.raises(FileError, match="delete the folder"):
            trainer(examples, tmp_path).run(nothing)
    fresh = trainer(examples, tmp_path)
    assert load_checkpoint(tmp_path / "nowhere", fresh.module, fresh.optimizer) is None


def test_a_loss_that_is_no_number_stops_before_the_weights_are_spoilt(
    examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(examples, tmp_path)
    real, last = run.objective.loss, {}

    def spoilt(*args: Any) -> Any:
        scores = real(*args)
        if run.done == 3:
            last.update(weights(run))
            scores.loss = scores.loss * float("nan")
        return scores

    monkeypatch.setattr(run.objective, "loss", spoilt)
    with pytest.raises(FileError, match="learning rate") as caught:
        run.run(nothing)
    assert same(weights(run), last)
    said = str(caught.value)
    (batch,) = [item[0] for item in itertools.islice(run.epoch(0), 3, 4)]
    assert f"at step 4 of {run.steps}, in the batch with the rows {', '.join(batch.names)}" in said
    assert batch.names[0].startswith("toy ")
    assert f"the checkpoint of step 3 is kept in {tmp_path}" in said
    assert "\n" not in said
    assert json.loads((tmp_path / "checkpoint.json").read_text(encoding="utf-8"))["step"] == 3


def test_shielded_delivers_ctrl_c_afterwards() -> None:
    done = []

    def interrupted() -> None:
        with shielded():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [1]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with shielded():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": 0.0},
        {"epochs": float("nan")},
        {"lr": -1.0},
        {"batch_tokens": 0},
        {"segment": 0},
        {"warmup": -1},
        {"clip": 0.0},
        {"schedule": "flat"},
        {"checkpoint_every": 0},
    ],
)
def test_options_that_mean_nothing(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        TrainOptions(**bad)


def test_trainings_that_cannot_be(examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no examples"):
        trainer(examples[:4], tmp_path)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_and_falls(schedule: Any, examples: list[Example], tmp_path: Path) -> None:
    run = trainer(examples, tmp_path, replace(OPTIONS, schedule=schedule, warmup=4))
    rates = [run.rate(step) for step in range(run.steps)]
    assert rates[:5] == pytest.approx([OPTIONS.lr * share for share in (0.25, 0.5, 0.75, 1.0, 1.0)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[4:]))
    assert min(rates) >= 0.02 * OPTIONS.lr
