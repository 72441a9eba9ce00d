"""``anabranch transcribe``: files written whole, and one sentence for wrong usage before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

from anabranch.decoding.stats import Stats
from anabranch.speech.captions import FORMATS
from anabranch.speech.transcripts import Transcript
from anabranch.speech.windows import Segment
from toy_text import ToyFolders
from verbs import Anabranch

SEGMENTS = [
    Segment(0.0, 2.5, " Ever <tried> & failed.", [1], 0.0, -0.1, 1.0, None),
    Segment(3661.25, 3662.0, " A --> B", [2], 0.0, -0.1, 1.0, None),
]
TRANSCRIPT = Transcript("Ever <tried> & failed. A --> B", SEGMENTS, "en", 1.0, 4000.0, 2.0, "none", Stats())
FAST = ("--temperature", 0, "--language", "en", "--dtype", "float32", "--device", "cpu", "--drafter", "none")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of half a second."""
    made = []
    for name, pitch in (("one", 300), ("two", 800)):
        t = np.arange(8_000) / 16_000
        wavfile.write(tmp_path / f"{name}.wav", 16_000, (9000 * np.sin(2 * np.pi * pitch * t)).astype(np.int16))
        made.append(tmp_path / f"{name}.wav")
    return made


def test_captions_have_the_times_and_escapes_of_their_formats() -> None:
    assert FORMATS["txt"](TRANSCRIPT) == "Ever <tried> & failed.\nA --> B\n"
    assert FORMATS["srt"](TRANSCRIPT) == (
        "1\n00:00:00,000 --> 00:00:02,500\nEver <tried> & failed.\n\n2\n01:01:01,250 --> 01:01:02,000\nA -> B\n"
    )
    assert FORMATS["vtt"](TRANSCRIPT) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nEver &lt;tried&gt; &amp; failed.\n\n"
        "01:01:01.250 --> 01:01:02.000\nA -&gt; B\n"
    )
    record = json.loads(FORMATS["json"](TRANSCRIPT))
    assert [record["segments"][1][name] for name in ("id", "start", "end", "text")] == [1, 3661.25, 3662.0, " A --> B"]
    assert record["real_time_factor"] == 0.0005


def test_a_transcript_is_printed(anabranch: Anabranch, folder: Path, files: list[Path]) -> None:
    outcome = anabranch("transcribe", files[0], "--model", folder, *FAST, "--format", "json")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    assert (record["language"], record["duration"]) == ("en", 0.5)
    assert "0.5 s of sound in" in outcome.err
    assert "mean acceptance length 1.00" in outcome.err


def test_each_file_has_its_transcripts(anabranch: Anabranch, folder: Path, files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("transcribe", *files, "--model", folder, *FAST, "--out", out, "--format", "srt", "--format", "json")
    assert anabranch(*arguments).code == 0
    assert sorted(path.name for path in out.iterdir()) == ["one.json", "one.srt", "two.json", "two.srt"]
    first = (out / "one.json").read_text()
    again = anabranch(*arguments)
    assert again.code == 1
    assert "one.srt exists already" in again.err
    assert anabranch(*arguments, "--force").code == 0
    old, new = json.loads(first), json.loads((out / "one.json").read_text())
    said = [
        [{name: each[name] for name in ("start", "end", "text", "tokens")} for each in of["segments"]]
        for of in (old, new)
    ]
    assert said[0] == said[1]  # log probabilities may differ in rounding


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda one, two: (), "Missing argument"),
        (lambda one, two: (one.with_name("none.wav"),), "there is no file"),
        (lambda one, two: (one, "--format", "doc"), "--format must be txt, srt, vtt or json, got 'doc'"),
        (lambda one, two: (one, "--format", "srt", "--format", "vtt"), "several formats need --out"),
        (lambda one, two: (one, two, "--format", "srt"), "several files as srt need --out"),
        (lambda one, two: (one, one, "--out", one.parent / "out"), "two files would be written as"),
        (lambda one, two: (one, "--out", one / "out"), "cannot be written"),
        (lambda one, two: (one, "--rows", "0"), "rows must be a whole number of at least 1"),
        (lambda one, two: (one, "--task", "sing"), "task must be 'transcribe' or 'translate'"),
    ],
)
def test_wrong_usage_is_one_sentence(
    anabranch: Anabranch, files: list[Path], arguments: Callable[..., tuple[object, ...]], said: str
) -> None:
    outcome = anabranch("transcribe", *arguments(*files), "--model", "/no/such/folder")
    assert outcome.code in (1, 2)
    assert said in " ".join(outcome.err.split())
    assert outcome.out == ""


def test_a_model_of_text_is_refused(anabranch: Anabranch, toys: ToyFolders, files: list[Path]) -> None:
    outcome = anabranch("transcribe", files[0], "--model", toys.model, *FAST)
    assert outcome.code == 1
    assert "reads text, and only Whisper models transcribe" in " ".join(outcome.err.split())


def test_a_broken_file_leaves_nothing(anabranch: Anabranch, folder: Path, files: list[Path], tmp_path: Path) -> None:
    files[1].write_bytes(b"RIFF")
    outcome = anabranch("transcribe", *files, "--model", folder, *FAST, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "two.wav is not a WAV file" in " ".join(outcome.err.split())
    assert not (tmp_path / "out").exists()
