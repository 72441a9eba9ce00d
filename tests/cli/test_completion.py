"""Completion with Tab in a shell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from anabranch.bench.shapes import SHAPES
from anabranch.bench.suites import SUITES
from anabranch.cli.completion import drafters
from anabranch.methods import methods
from anabranch.model.quantize import QUANTIZATIONS
from anabranch.tasks import TASKS


def completed(*words: str) -> list[str]:
    """Completions that bash offers for the last word."""
    typed = " ".join(["anabranch", *words])
    env = {"_ANABRANCH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words))}
    code = "import sys; sys.argv = ['anabranch']; from anabranch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("generate", "--dtype", "b"), ["bfloat16"]),
        (("chat", "--quantize", "int"), ["int8", "int4"]),
        (("bench", "--method", "prompt"), ["prompt_lookup"]),
        (("info", "smol"), ["smollm2-135m-instruct"]),
        (("train", "streams", "--init", "smol"), ["smollm2-135m-instruct"]),
        (("train", "streams", "--recipe", "paper"), ["paper-lossless", "paper-shared"]),
        (("train", "streams", "--conditioning", "pa"), ["parent", "path"]),
        (("train", "lora", "--target-format", "n"), ["nf4"]),
    ],
)
def test_values_are_completed(words: tuple[str, ...], values: list[str]) -> None:
    assert completed(*words) == values


def test_drafters_are_completed_after_a_plus_sign_and_a_label() -> None:
    names = [method.name for method in methods()]
    assert set(drafters("")) == {"auto", *names}
    assert drafters("streams+suf") == ["streams+suffix"]
    assert drafters("streams:tree=8+suf") == ["streams:tree=8+suffix"]
    assert drafters("fast=suf") == ["fast=suffix"]
    assert drafters("streams:tr") == []


def test_the_values_are_those_of_the_library() -> None:
    # written out, since the library's own need torch
    assert {"spec_bench", "mt_bench", "humaneval", "gsm8k"} == set(SUITES)
    assert {"sql", "e2e", "dialogsum"} == set(TASKS)
    assert {"auto", "none", "int8", "int4"} == set(QUANTIZATIONS)
    assert {"135m", "7b", "13b", "33b"} == set(SHAPES)
