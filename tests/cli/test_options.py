"""Options shared by commands: escapes, limits, near misses."""

from __future__ import annotations

import json

import pytest

from anabranch.cli.options import Prompts, unescaped
from anabranch.errors import AnabranchWarning, InputError
from verbs import Anabranch


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"\n", "\n"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"a\tb\rc", "a\tb\rc"),
        (r"\x41\u00e9\U0001F600", "Aé😀"),
        (r"\ud83d\ude00", "😀"),
        (r"\boxed{\x4", r"\boxed{\x4"),
        ("\n日本\\", "\n日本\\"),
    ],
)
def test_escapes_of_stop_strings(typed: str, meant: str) -> None:
    assert unescaped(typed) == meant


@pytest.mark.parametrize("typed", [r"\ud800", r"\UFFFFFFFF"])
def test_an_escape_that_is_no_character_is_refused(typed: str) -> None:
    with pytest.raises(InputError, match="has an escape that is no character"):
        unescaped(typed)


def test_stop_at_a_line_break(anabranch: Anabranch, where: list[object]) -> None:
    words = ("generate", *where, "the thing", "--raw", "-n", 40, "--temperature", 1.5, "--drafter", "none", "--json")
    for seed in range(40):
        whole = json.loads(anabranch(*words, "--seed", seed).out)["text"]
        if "\n" in whole:
            break
    ended = json.loads(anabranch(*words, "--seed", seed, "--stop", r"\n").out)
    assert (ended["text"], ended["ended"]) == (whole.partition("\n")[0], "stop_string")


def test_a_limit_is_kept_exactly_or_what_there_is_is_said() -> None:
    assert len(Prompts(limit=4).read()) == 4
    with pytest.warns(AnabranchWarning, match="--limit 8 has no effect: the built-in prompts are 6; give more with"):
        assert len(Prompts(limit=8).read()) == 6
    assert len(Prompts().read(limit=12)) == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--drafter", "sufix"), "there is no drafter 'sufix' (did you mean 'suffix'?)"),
        (("--dtype", "bfloat"), "the dtype 'bfloat' is not known (did you mean 'bfloat16'?)"),
        (("--quantize", "int-4"), "got 'int-4' (did you mean 'int4'?)"),
        (("--device", "cud"), "the device 'cud' is not known (did you mean 'cuda'?)"),
        (("--rule", "rejecton"), "got 'rejecton' (did you mean 'rejection'?)"),
        (("--maxnew-tokens", "8"), "--max-new-tokens"),
    ],
)
def test_the_nearest_value_is_suggested(anabranch: Anabranch, words: tuple[str, str], said: str) -> None:
    done = anabranch("generate", "hello", *words)
    assert done.code in (1, 2)
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "spec_bank"), "there is no suite or file 'spec_bank' (did you mean 'spec_bench'?)"),
        (("task", "dialogsun"), "(did you mean 'dialogsum'?)"),
        (("--peer", "openvno"), "there is no peer 'openvno' (did you mean 'openvino'?)"),
        (("task", "sql", "--metric", "rogue"), "(did you mean 'rouge'?)"),
        (("shape", "7bb"), "(did you mean '7b'?)"),
    ],
)
def test_the_nearest_value_of_bench_is_suggested(anabranch: Anabranch, words: tuple[str, ...], said: str) -> None:
    assert said in anabranch("bench", *words).err
