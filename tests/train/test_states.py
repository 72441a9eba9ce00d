"""States of the frozen target that are kept on disk: the same training, and no file that is not whole is ever used."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.errors import FileError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.recipe import TrainOptions
from anabranch.learning.target import TargetStates, frozen_target
from anabranch.methods.streams.objective import StreamObjective
from anabranch.train import states as kept_states
from anabranch.train.data import batches
from anabranch.train.states import Form, KeptStates
from anabranch.train.trainer import Progress, Trainer
from small import prompt, small, small_adapter

OPTIONS = TrainOptions(epochs=3.0, batch_tokens=60, lr=2e-2, warmup=1, segment=8)
SIZES = ((5, 9), (1, 4), (3, 14), (4, 6), (2, 11), (6, 7), (7, 5))
FORMS: tuple[Form, ...] = ("exact", "int8")


def texts() -> list[Example]:
    return [Example(tuple(prompt(p, p)), tuple(prompt(a, 30 + a)), "toy", n) for n, (p, a) in enumerate(SIZES)]


def trainer(
    folder: Path,
    keep: str,
    *,
    plan: dict[str, str] | None = None,
    states: Path | None = None,
    target_format: str = "stored",
) -> tuple[Trainer, list[int]]:
    """A trainer, and a list that receives the rows of each pass of the frozen target."""
    torch.manual_seed(0)
    adapter, passes = small_adapter(small()).requires_grad_(True), list[int]()
    objective = StreamObjective(small(), adapter, segment=8)
    run = objective.run

    def counted(batch: Batch, **options: Any) -> TargetStates:
        passes.append(batch.size)
        return run(batch, **options)

    objective.run = counted
    options = replace(OPTIONS, keep_states=keep, target_format=target_format)  # type: ignore[arg-type]
    examples = texts()
    parts = small(), adapter, objective, examples[2:], examples[:2], options, folder
    return Trainer(*parts, plan=plan, states=states), passes


def losses(run: Trainer, stop: int = 10**6) -> list[float]:
    """Train up to a step; the losses of all steps."""
    seen: list[float] = []

    def report(progress: Progress) -> None:
        seen.append(progress.loss)
        if progress.step == stop:
            raise KeyboardInterrupt

    if stop < run.steps:
        with pytest.raises(KeyboardInterrupt):
            run.run(report)
    else:
        run.run(report)
    return seen


@pytest.mark.parametrize(("form", "near"), [("exact", 1e-5), ("int8", 5e-3)])
def test_a_training_is_the_same_with_kept_states(tmp_path: Path, form: str, near: float) -> None:
    plain, passes = trainer(tmp_path / "plain", "none")
    wanted = losses(plain)
    assert sum(passes) > 3 * len(plain.examples), "every epoch and evaluation runs the target"
    run, passes = trainer(tmp_path / "kept", form)
    assert losses(run) == pytest.approx(wanted, rel=near)
    assert sum(passes) == len(SIZES), "each example is computed once"
    run.evaluate()
    assert not (tmp_path / "kept" / "states").exists(), "a finished run needs no states"


def test_trainings_on_the_same_examples_share_states(tmp_path: Path) -> None:
    first, passes = trainer(tmp_path / "a", "exact", states=tmp_path / "states")
    wanted = losses(first)
    second, more = trainer(tmp_path / "b", "exact", plan={"arithmetic": "another"}, states=tmp_path / "states")
    assert losses(second) == wanted
    assert (sum(passes), more) == (len(SIZES), [])
    other, others = trainer(tmp_path / "c", "exact", plan={"target": "another"}, states=tmp_path / "states")
    losses(other)
    assert sum(others) == len(SIZES)
    narrow, its = trainer(tmp_path / "d", "exact", states=tmp_path / "states", target_format="nf4")
    losses(narrow)
    assert sum(its) == len(SIZES), "a target in 4 bits has other states"
    assert len(list((tmp_path / "states").iterdir())) == 3
    with pytest.raises(InputError, match="use --keep-states exact, or int8"):
        trainer(tmp_path / "e", "none", states=tmp_path / "states")


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_reads_them_and_ends_alike(tmp_path: Path, form: str) -> None:
    whole = losses(trainer(tmp_path / "whole", form)[0])
    first = losses(trainer(tmp_path / "part", form)[0], stop=4)
    run, passes = trainer(tmp_path / "part", form)
    assert [*first, *losses(run)] == whole
    assert sum(passes) <= 2, "all but the examples that are held out were known"


def store(folder: Path, form: Form = "int8", identity: str = "a", said: list[str] | None = None) -> KeptStates:
    say = [].append if said is None else said.append
    return KeptStates(folder, small(), texts(), identity=identity, form=form, say=say)


def read(
    kept: KeptStates, examples: Sequence[Example] | None = None, *, started: bool = False
) -> tuple[TargetStates, int]:
    """The states of some examples, and the number of passes that they took."""
    passes = 0
    run = frozen_target(small(), None)

    def counted(batch: Batch, **options: Any) -> TargetStates:
        nonlocal passes
        passes += 1
        return run(batch, **options)

    asked = kept.keeping(counted, started=started)
    return asked(Batch.of(examples or texts()), taps=(1,), keys_from=1), passes


@pytest.mark.parametrize("started", [True, False])
def test_8_bits_are_near_and_exact_ones_are_equal(tmp_path: Path, started: bool) -> None:
    batch = Batch.of(texts())
    wanted = frozen_target(small(), None)(batch, taps=(1,), keys_from=1)
    real = torch.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]
    after = real & (torch.arange(batch.tokens_BT.shape[1]) >= batch.starts_B[:, None]) if started else real
    for form in FORMS:
        found, passes = read(store(tmp_path / form, form), started=started)
        again, more = read(store(tmp_path / form, form), started=started)
        assert (passes, more) == (1, 0)
        pairs = [(found.hidden_BTD, wanted.hidden_BTD, after), (found.taps[1], wanted.taps[1], after)]
        for mine, theirs in zip(found.keys_values, wanted.keys_values, strict=True):
            pairs += [(a.transpose(1, 2), b.transpose(1, 2), real) for a, b in zip(mine, theirs, strict=True)]
        for a, b, where in pairs:
            assert a.dtype == b.dtype
            if form == "exact":
                assert torch.equal(a[where], b[where])
            else:
                step = b[where].abs().amax() / 127
                assert 0 < float((a[where] - b[where]).abs().max()) <= float(step) / 2 * 1.01
        assert torch.equal(again.hidden_BTD, found.hidden_BTD)


def test_a_batch_with_other_examples_is_computed(tmp_path: Path) -> None:
    others = [*texts()[:2], Example((3, 4), (5, 6, 7))]
    assert read(store(tmp_path), others)[1] == 1
    assert not list(tmp_path.iterdir())


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, 0),
        lambda path: damage(path, 3),
        lambda path: damage(path, 30),
        lambda path: damage(path, path.stat().st_size // 2),
        lambda path: path.unlink(),
    ],
)
def test_a_damaged_file_is_computed_again(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    wanted, _ = read(store(tmp_path))
    spoil(tmp_path / "states")
    found, passes = read(store(tmp_path))
    assert passes == 1
    assert torch.equal(found.hidden_BTD, wanted.hidden_BTD)
    assert all(torch.equal(a, b) for a, b in zip(found.keys_values[0], wanted.keys_values[0], strict=True))
    assert read(store(tmp_path))[1] == 0


def test_only_the_damaged_example_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(store(tmp_path))
    damage(tmp_path / "states", (tmp_path / "states").stat().st_size - 200)
    kept, written = store(tmp_path), list[int]()
    real = kept_states._InFile.write
    monkeypatch.setattr(kept_states._InFile, "write", lambda self, n, x: (written.append(n), real(self, n, x)))
    read(kept)
    assert written == [len(SIZES) - 1]


def test_states_of_another_target_or_form_are_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    for form, identity in (("int8", "a"), ("int8", "b"), ("exact", "b")):
        assert read(store(tmp_path, form, identity, said))[1] == 1  # type: ignore[arg-type]
        assert read(store(tmp_path, form, identity, said))[1] == 0  # type: ignore[arg-type]
    assert [f"GB of {tmp_path / 'states'}" in line for line in said] == [True] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_processes_that_begin_together_share_one_file(tmp_path: Path) -> None:
    path, size = tmp_path / "states", 1 << 16

    def made(_: int) -> int:
        barrier.wait()
        kept_states._create(path, b"head", size)
        return path.stat().st_ino

    for _ in range(50):
        path.write_bytes(b"the states of another run")
        barrier = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(made, range(8)))) == 1
        assert path.stat().st_size == size
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_of_another_target_does_not_read_them(tmp_path: Path) -> None:
    losses(trainer(tmp_path, "int8", plan={"target": "a"})[0], stop=4)
    (tmp_path / "checkpoint.safetensors").unlink()
    run, passes = trainer(tmp_path, "int8", plan={"target": "b"})
    losses(run, stop=1)
    assert passes


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FileError) as caught:
        read(store(tmp_path / "run"))
    said = str(caught.value)
    assert "GB of the target's states (No space left on device); free some space, or use --keep-states none" in said
    assert not list((tmp_path / "run").iterdir())


def test_other_forms_are_refused() -> None:
    with pytest.raises(InputError, match="keep_states must be none, exact or int8, got 'int4'"):
        TrainOptions(keep_states="int4")  # type: ignore[arg-type]


def test_batches_do_not_depend_on_what_is_kept(tmp_path: Path) -> None:
    run, _ = trainer(tmp_path, "int8")
    for number in range(2):
        wanted = batches(run.examples, OPTIONS.batch_tokens, seed=number)
        assert [b.names for b, _ in run.epoch(number)] == [b.names for b in wanted]
