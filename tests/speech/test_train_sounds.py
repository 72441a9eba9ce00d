"""Streams trained on a Whisper's own transcripts: windows of sounds as completions, and drafts that change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.io import wavfile

from anabranch.api import Model, load
from anabranch.errors import CapabilityError, FileError
from anabranch.train.answers import EncodedPrompt, write_answers
from anabranch.train.job import read_data, train_adapter, trainable
from anabranch.train.sounds import found_sounds, write_transcripts
from test_doc_commands import FENCED, ROOT, commands, forget, shrunk, write
from toy_text import VOCABULARY, byte_tokenizer, toy_model
from verbs import Anabranch

STREAMS: Any = {"num_streams": 2, "stream_layers": 1, "adapter_rank": 4, "attention_rank": 4, "conditioning_rank": 32}


@pytest.fixture
def files(tmp_path: Path, sounds: list[NDArray[np.float32]]) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for number, sound in enumerate(sounds):
        wavfile.write(folder / f"{number}.wav", 16_000, sound)
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
def test_windows_are_those_of_transcribe_and_a_run_goes_on(model: Model, files: Path, tmp_path: Path) -> None:
    out, listed = tmp_path / "answers.jsonl", found_sounds([files])
    done = write_transcripts(model.target, listed, out, rows=2, language="en")
    whole = rows(out)
    assert (done.answers, done.wanted, done.tokens) == (3, 3, sum(len(row["answer_ids"]) for row in whole))
    for path in listed:
        windows = model.transcribe(path, language="en").windows
        own = [row for row in whole if row["sound"]["file"] == str(path)]
        assert [(row["prompt_ids"], row["answer_ids"]) for row in own] == [
            (each.prompt_ids, each.token_ids) for each in windows
        ]
        assert [row["sound"]["last"] for row in own] == [False] * (len(own) - 1) + [True]
    assert len(rows(out)) > 3, "the first sound has two windows"
    out.write_text("".join(json.dumps(row) + "\n" for row in whole[:1]))  # ended between two windows of a sound
    write_transcripts(model.target, listed, out, language="en")
    assert sorted(rows(out), key=lambda row: row["id"]) == sorted(whole, key=lambda row: row["id"])
    with pytest.raises(FileError, match="was started with language 'en', got 'de'; use that, or write to another file"):
        write_transcripts(model.target, listed, out, language="de")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_an_adapter_drafts_transcripts(
    folder: Path, files: Path, tmp_path: Path, anabranch: Anabranch, sounds: list[NDArray[np.float32]]
) -> None:
    out, made, loads = tmp_path / "answers.jsonl", tmp_path / "adapter", ("--model", folder, "--dtype", "float32")
    done = anabranch("train", "answers", *loads, "--sounds", files, "--language", "en", "--out", out)
    assert "transcripts of 3 sounds" in done.out, done.err
    options = [f"--{name.replace('_', '-')}={value}" for name, value in STREAMS.items()]
    recipe = "--recipe", "small", *options, "--held-out", 1, "--batch-tokens", 64, "--epochs", 1
    done = anabranch("train", "streams", *loads, "--answers", out, "--out", made, *recipe)
    assert done.code == 0, done.err
    drafting = load(folder, dtype="float32", device="cpu", adapter=made)
    for options in ({"temperature": 0.0}, {"temperature": 0.7}, {"parallel": True, "rows": 3}):
        plain, drafted = (
            drafting.transcribe(sounds, language="en", drafter=drafter, **options) for drafter in ("none", "streams")
        )
        assert [each.windows for each in drafted] == [each.windows for each in plain]
        assert sum(each.stats.draft_nodes for each in drafted) > 0
    assert drafting.transcribe(sounds[0], language="en").drafter.startswith("streams")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.AnabranchWarning")
def test_commands_of_the_page_run_as_written(
    folder: Path, files: Path, tmp_path: Path, anabranch: Anabranch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": VOCABULARY - 1}
    for each in (T5ForConditionalGeneration(T5Config(**sizes, **ends)), byte_tokenizer(template=False)):
        each.save_pretrained(tmp_path / "MODEL")
    shutil.copytree(tmp_path / "MODEL", tmp_path / "google" / "flan-t5-small")
    shutil.copytree(tmp_path / "MODEL", tmp_path / "FOLDER")
    shutil.copytree(folder, tmp_path / "whisper-base")
    files.rename(tmp_path / "recordings")
    shutil.copy(tmp_path / "recordings" / "0.wav", tmp_path / "talk.wav")
    write(tmp_path / "sources.jsonl", [{"prompt": f"the source {n}"} for n in range(8)])
    monkeypatch.chdir(tmp_path)
    for words in commands(ROOT / "docs" / "encoder_decoder.md", FENCED):
        forget(words)
        layers = ["--stream-layers", 2, "--pruning-rank", 0] if words[:2] == ["train", "streams"] else []
        done = anabranch(*shrunk(words), *layers)
        assert done.code == 0, f"{words}\n{done.err[-2000:]}"


def test_bad_data_are_one_sentence(model: Model, files: Path, tmp_path: Path, anabranch: Anabranch) -> None:
    with pytest.raises(FileError, match=r"there is no sound .*none.wav; give a WAV file or a folder of them"):
        found_sounds([files, tmp_path / "none.wav"])
    out, recipe = tmp_path / "answers.jsonl", trainable("streams").trained.training.recipe("small", STREAMS)
    with pytest.raises(CapabilityError, match=r"reads speech; give sounds \(--sounds\)"):
        write_answers(model.target, [EncodedPrompt(0, "", (1, 2))], out)
    text = toy_model()
    with pytest.raises(CapabilityError, match="reads text, and only Whisper models transcribe"):
        write_transcripts(text.target, found_sounds([files]), tmp_path / "text.jsonl")
    write_transcripts(model.target, found_sounds([files]), out, language="en")
    good = rows(out)
    for change, reason in (
        ({"sound": None}, "line 1 of .* is no window of a sound: it needs a field 'sound' with file, start and stop"),
        (
            {"sound": {**good[0]["sound"], "start": 9000, "stop": 9100}},
            "line 1 of .* begins at 90.0 s, and .* is short",
        ),
        ({"sound": {**good[0]["sound"], "file": "/none.wav"}}, "there is no file /none.wav"),
    ):
        out.write_text("".join(json.dumps({**row, **change}) + "\n" for row in good))
        with pytest.raises(FileError, match=reason):
            read_data(model.target, recipe, answers=out)
    shutil.rmtree(files)
    for words, reason in (
        (("--sounds", files), "there is no sound"),
        (("--sounds", out, "--task", "e2e"), "--task gives prompts, and --sounds gives sounds; give one"),
        (("--sounds", out, "--limit", 3), "--limit is for prompts, and --sounds gives sounds; give one"),
        (("--prompts", out, "--language", "en"), "--language is for --sounds; leave it out"),
    ):
        done = anabranch("train", "answers", "--model", "none", "--out", tmp_path / "new.jsonl", *words)
        assert done.code
        assert reason in done.err.replace("\n", " ")


def test_no_prompts_and_a_method_that_reads_no_source(model: Model, tmp_path: Path) -> None:
    recipe = trainable("eagle").trained.training.recipe(None, {})
    with pytest.raises(CapabilityError, match="eagle does not draft for encoder-decoder models such as"):
        train_adapter(model.target, trainable("eagle"), recipe, [], tmp_path / "adapter")
