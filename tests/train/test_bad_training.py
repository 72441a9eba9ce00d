"""Training on what goes wrong: one clear sentence, the last checkpoint kept, and a clean resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from typer.testing import CliRunner, Result

from anabranch.cli.train import app
from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.learning.examples import Example
from anabranch.learning.recipe import TrainOptions
from anabranch.methods.streams.objective import StreamObjective
from anabranch.model import load
from anabranch.train import checkpoint as checkpoint_module
from anabranch.train.data import read_examples
from anabranch.train.job import train_adapter, trainable
from anabranch.train.trainer import Progress, Trainer
from small import CASES, VOCABULARY, as_target, prompt, small, small_adapter, write_answers

pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
TARGET = as_target(small(), name="default")
LIMIT = CASES["llama"].max_positions
OPTIONS = TrainOptions(epochs=4.0, batch_tokens=60, warmup=1, segment=8, checkpoint_every=3)


def trainer(folder: Path) -> Trainer:
    torch.manual_seed(0)
    module = small_adapter(small()).requires_grad_(True)
    texts = [Example(tuple(prompt(3, n)), tuple(prompt(9, 30 + n)), "toy", n) for n in range(8)]
    return Trainer(small(), module, StreamObjective(small(), module, segment=8), texts, [], OPTIONS, folder)


def weights(run: Trainer) -> dict[str, Tensor]:
    run.run(lambda _: None)
    return run.module.state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("full_at", [3, 6])
def test_a_full_disk_keeps_the_last_checkpoint(full_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, run = checkpoint_module.save_file, trainer(tmp_path / "part")

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        real(tensors, path, metadata=metadata)
        if run.done >= full_at:
            path.write_bytes(path.read_bytes()[:100])  # as far as there was room
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", full)
        with pytest.raises(FileError) as caught:
            run.run(lambda _: None)
    said = str(caught.value)
    assert said.startswith(f"the checkpoint of step {full_at} cannot be written to {tmp_path / 'part'} (")
    assert "No space left on device" in said
    assert said.endswith("free some space there, and the same command resumes")
    assert ("the last one is kept" in said) == (full_at > 3)
    left = {path.name for path in (tmp_path / "part").iterdir()} - {"log.jsonl", ".lock"}
    assert left == ({"checkpoint.safetensors", "checkpoint.json"} if full_at > 3 else set())
    again = trainer(tmp_path / "part")
    assert same(weights(again), weights(trainer(tmp_path / "whole")))


def test_what_a_process_killed_while_saving_leaves_behind_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path).run(lambda progress: (_ for _ in ()).throw(KeyboardInterrupt) if progress.step == 4 else None)
    (tmp_path / ".checkpoint.4711.tmp").write_bytes(b"half of a")
    run = trainer(tmp_path)
    run.run(lambda _: None)
    assert run.done == run.steps
    assert not list(tmp_path.glob(".checkpoint*"))


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    run, refused = trainer(tmp_path / "one"), []

    def second(progress: Progress) -> None:
        if progress.step == 2:
            with pytest.raises(FileError, match=r"another process trains in .*one; wait for it or stop it, or give "):
                trainer(tmp_path / "one").run(lambda _: None)
            refused.append(progress.step)

    run.run(second)
    assert refused == [2]
    assert same(run.module.state_dict(), weights(trainer(tmp_path / "alone"))), "the first one went on undisturbed"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """The options of a run in ``tmp_path / "run"`` that was stopped after a step."""
    monkeypatch.setattr(load, "load_target", lambda *_, **__: TARGET)
    path = write_answers(tmp_path / "a.jsonl")
    options = ("--answers", path, "--out", tmp_path / "run", "--recipe", "small", "--held-out", 2, "--no-timing")
    stopped = Trainer._report

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_report", stop)
    assert call("streams", *options, "--stream-layers", 2).exit_code == 130
    monkeypatch.setattr(Trainer, "_report", stopped)
    return options


def test_a_checkpoint_of_another_gamma_target_or_method(
    begun: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (tmp_path / "run" / "training" / "checkpoint.safetensors").read_bytes()

    def refused(*arguments: object) -> str:
        found = call(*arguments).exception
        assert isinstance(found, FileError)
        assert "\n" not in str(found)
        assert (tmp_path / "run" / "training" / "checkpoint.safetensors").read_bytes() == kept
        return str(found)

    streams = ("streams", *begun, "--stream-layers", 2)
    assert "was started with num_streams 4 (now 3); use that, another folder" in refused(*streams, "--num-streams", 3)
    assert "belongs to another method (streams, now medusa); give another folder" in refused("medusa", *begun)
    other = as_target(small("mistral"), name="default")
    with monkeypatch.context() as patch:
        patch.setattr(load, "load_target", lambda *_, **__: other)
        names = f"({TARGET.fingerprint[:12]}, now {other.fingerprint[:12]})"
        assert f"belongs to another target {names}; give another folder" in refused(*streams)
    # the same for the same target of another method begins anew if that is asked for; the run itself resumes
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert call("medusa", *begun, "--no-resume").exit_code == 0
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "copy", tmp_path / "run")
    assert call(*streams).exit_code == 0


def write(path: Path, sizes: list[tuple[int, int]]) -> Path:
    lines = [{"prompt_ids": prompt(p, n), "answer_ids": prompt(a, 50 + n)} for n, (p, a) in enumerate(sizes)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_sequences_over_the_targets_limit_are_cut_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [(5, 200), (LIMIT, 9), (LIMIT - 1, 9), (LIMIT - 2, 9), (4, 7)])
    with pytest.warns(
        TrainingWarning, match=rf"^2 of 5 rows of .* are left out: 2 whose prompt fills the {LIMIT} tokens"
    ):
        examples = read_examples(path, vocab_size=VOCABULARY, max_tokens=LIMIT)
    assert [(len(each.prompt_ids), len(each.answer_ids)) for each in examples] == [(5, 91), (94, 2), (4, 7)]
    path = write(tmp_path / "b.jsonl", [(LIMIT, 9), (LIMIT + 5, 9), (3, 1)])
    with pytest.raises(FileError, match=rf"completion of at least 2 tokens: 2 whose prompt fills the {LIMIT} tokens"):
        read_examples(path, vocab_size=VOCABULARY, max_tokens=LIMIT)


def test_an_example_over_the_targets_limit_is_named(tmp_path: Path) -> None:
    method = trainable("streams")
    assert method.trained is not None
    recipe = method.trained.training.recipe("small", {"stream_layers": 2, "held_out": 1})
    texts = [Example(tuple(prompt(5)), tuple(prompt(LIMIT - 4)), "mine", 7), Example((1, 2), (3, 4, 5))]
    with pytest.raises(
        InputError, match=rf"the example mine 7 has {LIMIT + 1} tokens, and the target's context {LIMIT};"
    ):
        train_adapter(TARGET, method, recipe, texts, tmp_path, report=lambda _: None)
    assert not list(tmp_path.iterdir())
