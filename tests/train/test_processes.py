"""Training in several processes: the loss of one, the checkpoint of one, and an interrupt stops all of them."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.errors import DeviceError, InputError
from anabranch.learning.examples import Example
from anabranch.learning.recipe import TrainOptions
from anabranch.methods.streams.objective import StreamObjective
from anabranch.train import processes as processes_module
from anabranch.train.processes import Processes, joined, launched
from anabranch.train.trainer import Progress, Trainer
from small import prompt, small, small_adapter, write_answers
from toy_text import ToyFolders

pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
OPTIONS = TrainOptions(epochs=3.0, batch_tokens=70, warmup=1, segment=8, evaluate_every=2, checkpoint_every=2)


class Board:
    """The numbers that threads report to each other."""

    def __init__(self, count: int) -> None:
        self.barrier, self.slots = threading.Barrier(count, timeout=300), [None] * count


class Thread(Processes):
    """Threads in the place of processes: the same sums without the seconds that processes need to start."""

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, len(board.slots))
        self.board = board

    def _all(self, value: Any) -> list[Any]:
        self.board.slots[self.rank] = value
        self.board.barrier.wait()
        found = list(self.board.slots)
        self.board.barrier.wait()
        return found

    def add(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def broadcast(self, value: Any) -> Any:
        return self._all(value)[0]


def texts() -> list[Example]:
    return [Example(tuple(prompt(3 + n % 4, n)), tuple(prompt(5 + n % 7, 30 + n)), "toy", n) for n in range(13)]


def trained(
    folder: Path,
    count: int,
    options: TrainOptions = OPTIONS,
    *,
    until: int = -1,
    data: Callable[[int], Any] = lambda _: 0,
    sharded: bool = False,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """The losses that are reported, and the weights of each process; ``data`` counts the rows that it leaves out."""
    board, seen = Board(count), list[float]()

    def report(progress: Progress) -> None:
        seen.append(progress.loss)
        if progress.step == until:
            raise KeyboardInterrupt

    def one(rank: int) -> dict[str, Tensor]:
        target = copy.deepcopy(small())
        module = small_adapter(target).requires_grad_(True)
        objective = StreamObjective(target, module, segment=options.segment)
        mine = Thread(rank, board) if count > 1 else Processes()
        mine.sharded, calls = sharded, torch.zeros(())
        for block in target.blocks:
            block.register_forward_pre_hook(lambda *_: calls.add_(1) and None)
        examples = texts()[data(rank) :]
        run = Trainer(target, module, objective, examples[2:], examples[:2], options, folder, processes=mine)
        try:
            run.run(report)
        except BaseException:
            board.barrier.abort()
            raise
        return {**module.state_dict(), **({"calls": calls} if sharded else {})}

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, rank) for rank in range(count)]
    for future in futures if until < 0 else ():  # the one that failed by itself says why, not one that waited for it
        if (error := future.exception()) is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return seen, [future.result() for future in futures] if until < 0 else []


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, {"accumulate": 2, "patience": 1}),
        pytest.param(3, {"accumulate": 2, "keep_states": "exact"}, marks=pytest.mark.thorough),
        pytest.param(2, {}, marks=pytest.mark.thorough),
    ],
)
def test_several_processes_train_as_one(count: int, changes: dict[str, Any], tmp_path: Path) -> None:
    options = replace(OPTIONS, **changes)
    alone, (weights,) = trained(tmp_path / "one", 1, options)
    together, each = trained(tmp_path / "many", count, options)
    assert len(alone) >= 4
    assert together == pytest.approx(alone, rel=1e-4)
    for other in each[1:]:
        assert all(torch.equal(value, each[0][name]) for name, value in other.items())
    for name, value in weights.items():
        assert torch.allclose(value, each[0][name], atol=2e-3), name
    logs = [(tmp_path / name / "log.jsonl").read_text(encoding="utf-8").splitlines() for name in ("one", "many")]
    assert [json.loads(line)["step"] for line in logs[0]] == [json.loads(line)["step"] for line in logs[1]]


@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.thorough)])
def test_a_run_resumes_with_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    alone, _ = trained(tmp_path / "whole", 1)
    first, _ = trained(tmp_path / "part", before, until=4)
    then, _ = trained(tmp_path / "part", after)
    assert [*first, *then] == pytest.approx(alone, rel=1e-4)


def test_processes_with_other_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the processes have other examples or initial weights; give all the same"):
        trained(tmp_path, 2, data=lambda rank: rank)


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with joined() as alone:
        assert (alone.rank, alone.count, alone.first) == (0, 1, True)
        assert alone.broadcast("me") == "me"
        assert alone.add(torch.ones(2)).tolist() == [1, 1]
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (launched().rank, launched().count, launched().first) == (1, 2, False)
    refused = CliRunner().invoke(app, ["train", "streams", "--out", str(tmp_path / "out")])
    assert isinstance(refused.exception, InputError)
    assert "write them first with 'anabranch train answers'" in str(refused.exception)


def test_a_process_that_is_gone_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    monkeypatch.setattr(processes_module.dist, "all_reduce", gone)
    with pytest.raises(DeviceError, match="another process of this training has ended; its own message says why"):
        Processes(0, 2).add(torch.ones(1))


@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_that_share_a_target_call_its_layers_alike(accumulate: int, tmp_path: Path) -> None:
    """Every call gathers weights from all processes, so one call too few would leave the others waiting."""
    options = replace(OPTIONS, accumulate=accumulate, segment=3, batch_tokens=40)
    alone, _ = trained(tmp_path / "one", 1, options)
    together, each = trained(tmp_path / "three", 3, options, sharded=True)
    assert together == pytest.approx(alone, rel=1e-4)
    calls = [weights["calls"].item() for weights in each]
    assert calls == [calls[0]] * 3
    assert calls[0] > 0


def launch(arguments: list[str], *program: object, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, *map(str, program or ("-m", "anabranch")), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a process that is aborted says where: one was once, under load, after its last step
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **env},
    )


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


@pytest.fixture
def arguments(toys: ToyFolders, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a training that writes to a folder."""
    data = write_answers(tmp_path / "a.jsonl")

    def made(folder: Path, epochs: int) -> list[str]:
        words = ("train", "streams", "--model", toys.model, "--answers", data, "--out", folder, "--recipe", "small")
        more = ("--batch-tokens", 60, "--held-out", 2, "--epochs", epochs, "--stream-layers", 1)
        return [*map(str, (*words, *more)), "--evaluate-every", "10", "--no-timing"]

    return made


@pytest.mark.thorough
def test_two_real_processes_share_a_target(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, arguments(tmp_path / "one", 2)).exit_code == 0
    process = launch([*arguments(tmp_path / "two", 2), "--shard-target", "--recompute"])
    said = process.communicate(timeout=300)
    assert process.returncode == 0, "\n".join(said)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    lone = CliRunner().invoke(app, [*arguments(tmp_path / "lone", 2), "--shard-target"])
    assert "--shard-target is for several processes; start them with torchrun" in str(lone.exception)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
def test_two_real_processes_train_stop_and_resume_as_one(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert CliRunner().invoke(app, arguments(tmp_path / "one", 16)).exit_code == 0
    process = launch(arguments(tmp_path / "two", 16))
    said = process.communicate(timeout=300)
    assert process.returncode == 0, "\n".join(said)
    assert said[0].count("parameters") == 1, "one process prints"
    alone = losses(tmp_path / "one")
    assert len(alone) > 5
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-3)

    process = launch(arguments(tmp_path / "stopped", 16), Path(__file__).with_name("held.py"), HOLD=str(tmp_path))
    while process.poll() is None and len(list(tmp_path.glob("held-*"))) < 2:
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    os.kill(int(children[-1]), signal.SIGINT)  # one of the two
    (tmp_path / "go").touch()
    said = process.communicate(timeout=300)
    assert process.returncode != 0
    assert said[1].count("the same command resumes from here") == 2, said[1]
    record = json.loads((tmp_path / "stopped" / "training" / "checkpoint.json").read_text(encoding="utf-8"))
    assert record["step"] == 26 < max(alone)
    assert CliRunner().invoke(app, arguments(tmp_path / "stopped", 16)).exit_code == 0
    assert losses(tmp_path / "stopped") == pytest.approx(alone, rel=1e-3)
