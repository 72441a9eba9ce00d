"""Early stopping keeps the best weights, also in runs that were stopped; logs have the same numbers."""

from __future__ import annotations

import csv
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import TrainOptions
from anabranch.methods.streams.objective import StreamObjective
from anabranch.train import logs as logs_module
from anabranch.train.checkpoint import read_log
from anabranch.train.logs import Logs, check_logs
from anabranch.train.trainer import Progress, Trainer
from small import prompt, small, small_adapter

OPTIONS = TrainOptions(
    epochs=9.0, batch_tokens=60, warmup=1, segment=8, evaluate_every=2, checkpoint_every=3, patience=3
)
LENGTHS = [1.5, 1.7, 1.6, 1.7, 1.6, 9.0]  # of evaluations; the second is the best of the first five


class Run:
    """A toy run whose evaluations say what ``LENGTHS`` says, whatever the weights are."""

    def __init__(self, folder: Path, options: TrainOptions = OPTIONS, logs: tuple[str, ...] = ()) -> None:
        torch.manual_seed(0)
        self.module = small_adapter(small()).requires_grad_(True)
        objective = StreamObjective(small(), self.module, segment=options.segment)
        texts = [Example(tuple(prompt(3, n)), tuple(prompt(9, 30 + n)), "toy", n) for n in range(12)]
        self.trainer = Trainer(small(), self.module, objective, texts[2:], texts[:2], options, folder, logs=logs)
        self.at: dict[int, dict[str, Tensor]] = {}
        self.trainer.evaluate = self.evaluate  # type: ignore[method-assign]
        self.broken_at = -1

    def evaluate(self, rows: int | None = None, *, nodes: Any = ()) -> dict[str, Any]:
        done = self.trainer.done
        if nodes:
            return {"tree": -1.0}
        if done == self.broken_at:
            signal.raise_signal(signal.SIGINT)
        self.at[done] = {name: value.clone() for name, value in self.module.state_dict().items()}
        return {"tree": LENGTHS[min(done // self.trainer.evaluate_every, len(LENGTHS)) - 1], "chain": 1.25}

    def run(self, until: int = -1) -> list[Progress]:
        seen: list[Progress] = []

        def report(progress: Progress) -> None:
            seen.append(progress)
            if progress.step == until:
                raise KeyboardInterrupt

        self.trainer.run(report)
        return seen


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_it_stops_after_evaluations_without_gain_and_keeps_the_best_weights(tmp_path: Path) -> None:
    run = Run(tmp_path)
    seen = run.run()
    assert seen[-1].step == run.trainer.done == 10 < run.trainer.steps
    assert run.trainer.best.step == 4
    assert run.trainer.best.length == 1.7
    assert same(run.module.state_dict(), run.at[4])
    assert not same(run.at[4], run.at[10])
    again = Run(tmp_path)  # a run that has stopped does not go on
    assert again.run() == []
    assert same(again.module.state_dict(), run.at[4])


def test_without_patience_the_last_weights_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(OPTIONS, patience=0, epochs=2.0))
    assert run.run()[-1].step == run.trainer.steps
    assert not run.trainer.best.weights


@pytest.mark.parametrize("stop", [4, *(pytest.param(stop, marks=pytest.mark.thorough) for stop in (3, 5, 8, 9))])
@pytest.mark.parametrize("where", ["report", "evaluation"])
def test_a_run_that_was_stopped_keeps_the_same_weights(stop: int, where: str, tmp_path: Path) -> None:
    first, whole = Run(tmp_path / "part"), Run(tmp_path / "whole")
    whole.run()
    if where == "evaluation":
        first.broken_at = stop - stop % 2
    with pytest.raises(KeyboardInterrupt):
        first.run(until=stop if where == "report" else -1)
    second = Run(tmp_path / "part")
    second.run()
    assert second.trainer.done == whole.trainer.done
    assert second.trainer.best.record() == whole.trainer.best.record()
    assert same(second.module.state_dict(), whole.module.state_dict())


def test_patience_needs_evaluations() -> None:
    with pytest.raises(InputError, match="patience must be at least 0, got -1"):
        replace(OPTIONS, patience=-1)
    module = small_adapter(small()).requires_grad_(True)
    texts = [Example(tuple(prompt(3)), tuple(prompt(9)))]
    with pytest.raises(InputError, match="patience 3 needs evaluations: hold examples out"):
        Trainer(small(), module, StreamObjective(small(), module), texts, [], OPTIONS, Path())


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_has_the_lines_of_the_log_once(tmp_path: Path) -> None:
    for until in (5, -1):
        run = Run(tmp_path, logs=("csv",))
        if until > 0:
            with pytest.raises(KeyboardInterrupt):
                run.run(until)
            with (tmp_path / "log.csv").open("a", encoding="utf-8") as file:
                file.write("6,")  # what a killed run leaves behind
        else:
            run.run()
    lines, rows = read_log(tmp_path), rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    assert [float(row["loss"]) for row in rows] == [line["loss"] for line in lines]
    assert [float(row["held_out_tree"]) for row in rows] == LENGTHS[:5]
    assert [float(row["accuracy_3"]) for row in rows] == [line["accuracy"][2] for line in lines]
    assert (tmp_path / "log.csv").read_text(encoding="utf-8").startswith("step,loss,accuracy_1,")
    Run(tmp_path, replace(OPTIONS, epochs=0.1)).trainer.run(lambda _: None, resume=False)
    assert not (tmp_path / "log.csv").exists()


def test_tensorboard_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, logs=("tensorboard",)).run(5)
    Run(tmp_path, logs=("tensorboard",)).run()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("held_out_tree")] == [
        (2 * n, pytest.approx(length)) for n, length in enumerate(LENGTHS[:5], 1)
    ]
    assert [e.value for e in found.Scalars("loss")] == pytest.approx([line["loss"] for line in read_log(tmp_path)])


def test_logs_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no log 'tsv'; give csv or tensorboard"):
        check_logs(["tsv"])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(CapabilityError, match=r"pip install 'anabranch\[tensorboard\]', or use --log csv"):
        check_logs(["tensorboard"])
    logs = Logs(tmp_path, ["csv"], 2, 0)

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs_module.json, "dumps", full)
    with pytest.raises(FileError, match=r"log cannot be written to .* \(No space left on device\); free some space"):
        logs.write({"step": 1})
