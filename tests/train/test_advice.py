"""Warnings and advice: they come where a training goes wrong, and not in the runs that made the default adapter."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.learning.examples import Example
from anabranch.learning.recipe import TrainOptions
from anabranch.train.advice import Watch, before, curve_of, next_steps
from anabranch.train.trainer import Progress

RUNS = Path(__file__).resolve().parents[2] / "benchmarks" / "training-default-adapter-2026-11-21.jsonl"


def example(tokens: int, name: int | str = "") -> Example:
    return Example((1,), (2,) * (tokens - 1), "s", name)


def line(step: int, loss: float, tree: float | None = None, right: float = 0.5) -> dict[str, Any]:
    evaluation = None if tree is None else {"tree": tree}
    return {"step": step, "loss": loss, "accuracy": [right, right / 2], "evaluation": evaluation}


def progress(step: int, steps: int, loss: float = 1.0, tree: float | None = None) -> Progress:
    return Progress(step, steps, loss, (0.5,), 1.0, 1.0, None if tree is None else {"tree": tree})


def watched(lines: list[dict[str, Any]], steps: int, *, held_out: bool = True) -> list[str]:
    """The advice in the course of a run with this log."""
    watch, said = Watch(held_out), []
    for place, one in enumerate(lines):
        evaluation = one["evaluation"] or {}
        said += watch.see(lines[:place], progress(one["step"], steps, one["loss"], evaluation.get("tree")))
    return said


def test_enough_of_everything_is_no_reason_to_warn() -> None:
    examples = [example(100, n) for n in range(100)]
    assert before(examples, TrainOptions(warmup=10), 50, 9_900 * 12, max_tokens=101) == []


@pytest.mark.parametrize(
    ("warmup", "parameters", "max_tokens", "words"),
    [
        (11, 9_900 * 12, 101, "the warmup of 11 steps is more than 20% of the 50 steps"),
        (10, 9_900 * 12 + 1, 101, "9,900 completion tokens are few for 118,801 parameters"),
        (10, 9_900 * 12, 100, "100 of 100 examples are cut at 100 tokens"),
    ],
)
def test_too_few_data_and_cut_examples(warmup: int, parameters: int, max_tokens: int, words: str) -> None:
    examples = [example(100, n) for n in range(100)]
    (said,) = before(examples, TrainOptions(warmup=warmup), 50, parameters, max_tokens=max_tokens)
    assert words in said


def test_stretches_of_a_text_are_not_called_cut() -> None:
    assert before([example(100)] * 100, TrainOptions(warmup=1), 50, 1, max_tokens=100) == []


def test_a_loss_that_does_not_fall_is_told_once() -> None:
    steps = range(10, 410, 10)
    flat = [line(step, 5.0 + step / 1000) for step in steps]
    (said,) = watched(flat, 400, held_out=False)
    assert "the loss does not fall: " in said
    assert watched([line(step, 5.0 - step / 1000) for step in steps], 400, held_out=False) == []
    level = [line(step, 5.0 + step / 1000, 2.0 if step % 100 == 0 else None) for step in steps]
    assert len(watched(level, 400)) == 1
    rising = [line(step, 5.0, 2.0 + step / 1000 if step % 100 == 0 else None) for step in steps]
    assert watched(rising, 400) == [], "acceptance rises, so batches merely differ"
    better = [line(step, 5.0, 2.0 if step % 100 == 0 else None, 0.5 + step / 10_000) for step in steps]
    assert watched(better, 400) == [], "so do right predictions"


def test_held_out_acceptance_that_falls() -> None:
    (said,) = watched([line(10, 3.0, 2.0), line(20, 2.0, 2.3), line(30, 1.0, 2.2), line(40, 0.5, 2.1)], 1000)
    assert "mean acceptance length fell from 2.30 at step 20 to 2.20 at step 30" in said
    assert watched([line(10, 3.0, 2.0), line(20, 2.0, 2.3), line(30, 1.0, 2.27)], 1000) == []


def test_the_runs_that_made_the_default_adapter_raise_no_warning() -> None:
    lines = [json.loads(text) for text in RUNS.read_text(encoding="utf-8").splitlines()]
    starts = [0, *(n for n in range(1, len(lines)) if lines[n]["step"] <= lines[n - 1]["step"]), len(lines)]
    assert len(starts) > 3
    for first, end in itertools.pairwise(starts):
        assert watched(lines[first:end], lines[first]["steps"]) == []


def test_the_curve_ends_with_the_last_evaluation_of_the_same_examples() -> None:
    log = [line(10, 3.0, 1.5), line(20, 2.0), line(30, 2.0, 1.8)]
    assert curve_of(log) == [(10, 1.5), (30, 1.8)]
    assert curve_of(log, {"tree": 1.9}, 33) == [(10, 1.5), (30, 1.8), (33, 1.9)]
    assert curve_of(log, {"tree": 1.9}, 30) == [(10, 1.5), (30, 1.8)]


@pytest.mark.parametrize(
    ("lengths", "accuracy", "words"),
    [
        ((1.5, 1.8, 2.0, 2.2), 0.6, "still rising (+0.40 in the last third): more epochs or more completions"),
        ((1.5, 1.8, 2.0, 2.2), 0.7, "in the last third): new completions"),
        ((1.5, 2.2, 2.21, 2.2), 0.6, "flat in the last third: a larger adapter"),
        ((1.5, 2.2, 2.1, 2.0), 0.6, "falling since step 200 (best 2.20)"),
        ((1.5, 2.2), 0.6, "fewer than three evaluations show no trend"),
    ],
)
def test_what_to_try_next(lengths: tuple[float, ...], accuracy: float, words: str) -> None:
    curve = [(100 * place, length) for place, length in enumerate(lengths, 1)]
    (said,) = next_steps(curve, accuracy=accuracy, held_out_accuracy=0.6, speeds={"none": 9.0, "chain": 12.0})
    assert words in said
    slow = next_steps(curve, speeds={"none": 12.0, "chain": 9.0})
    assert "plain decoding is faster here" in slow[-1]
