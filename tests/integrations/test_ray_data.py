"""Completions on real Ray: two workers with a toy each, one of which is killed; the file is that of one process."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import AnabranchError
from anabranch.loading import LoadConfig
from anabranch.model.load import load_target
from anabranch.sampling import SamplingParams
from anabranch.train.answers import AnswerProgress, read_prompts, write_answers
from toy_text import ToyFolders
from verbs import Anabranch

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("local_ray")]

from ray._private.state import actors  # noqa: E402  # without the dashboard, that of ray.util.state is missing

from anabranch.integrations.ray_data import RayWorkers  # noqa: E402

COUNT = 192
ALIVE = ("MapWorker(Map(Worker))", "ALIVE")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"the {number} thing", "id": f"n{number}" if number % 2 else number} for number in range(COUNT)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file by id, each as often as it is there."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(lines, key=lambda line: str(line["id"]))


def test_a_worker_and_a_run_that_are_killed(toys: ToyFolders, prompts: Path, tmp_path: Path) -> None:
    target = load_target(str(toys.model))
    asked = read_prompts(prompts, target.tokenizer)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    common: dict[str, Any] = {"rows": 2, "max_new_tokens": 40, "sampling": SamplingParams(temperature=1.0, seed=3)}
    write_answers(target, asked, whole, **common)
    workers = RayWorkers(LoadConfig(str(toys.model)), 2)
    killed: list[str] = []

    def stop(now: AnswerProgress) -> None:
        if now.answers == 20:
            raise KeyboardInterrupt

    def kill(now: AnswerProgress) -> None:
        if not killed and now.answers > 20:
            running = [actor for actor in actors().values() if (actor["ActorClassName"], actor["State"]) == ALIVE]
            killed.append(running[0]["ActorID"])
            os.kill(running[0]["Pid"], signal.SIGKILL)

    with pytest.raises(KeyboardInterrupt):
        write_answers(target, asked, out, **common, complete=workers, report=stop)
    kept = out.read_text(encoding="utf-8")
    assert kept.count("\n") == 20
    done = write_answers(target, asked, out, **common, complete=workers, report=kill)
    assert actors()[killed[0]]["NumRestarts"] >= 1
    assert out.read_text(encoding="utf-8").startswith(kept)
    assert records(out) == records(whole)
    assert done.answers == COUNT
    assert write_answers(target, asked, out, **common, complete=workers).tokens == 0


def test_the_command(toys: ToyFolders, prompts: Path, tmp_path: Path, anabranch: Anabranch) -> None:
    words = ("train", "answers", "--model", toys.model, "--prompts", prompts, "-n", 5, "--json")
    results = [
        json.loads(anabranch(*words, "--out", tmp_path / name, *more).out)
        for name, more in (("one.jsonl", ()), ("ray.jsonl", ("--ray", 2)))
    ]
    assert records(tmp_path / "ray.jsonl") == records(tmp_path / "one.jsonl")
    for result in results:
        del result["tokens_per_second"]
    assert results[0] == results[1]


def test_a_worker_with_another_model_ends_the_run(toys: ToyFolders, prompts: Path, tmp_path: Path) -> None:
    target = replace(load_target(str(toys.model)), fingerprint="0" * 64)
    asked, out = read_prompts(prompts, target.tokenizer), tmp_path / "answers.jsonl"
    with pytest.raises(
        AnabranchError, match=r"a worker on Ray failed; .*: anabranch\.errors\.ModelError: .* on a worker"
    ):
        write_answers(target, asked, out, complete=RayWorkers(LoadConfig(str(toys.model))))
    assert not out.exists()
