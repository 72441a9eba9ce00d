"""``generate --prompts FILE.jsonl --out FILE``, and ``--json --stream``."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.api import Model
from anabranch.cli import generate_batch
from anabranch.errors import FileError
from anabranch.support.appended import append
from verbs import Anabranch

LINES: list[Any] = [
    {"prompt": "the thing"},
    {"id": "chat", "messages": [{"role": "user", "content": "one two"}], "max_new_tokens": 5, "category": "any"},
    {"id": "ids", "token_ids": [5, 6, 7], "temperature": 1, "seed": 4},
    "no object",
    {"id": "two", "prompt": "a", "token_ids": [1]},
    {"id": "empty", "prompt": " "},
    {"id": "bad", "prompt": "a", "temperature": -1},
    {"id": "rows", "prompt": "a", "rows": 3},
    {"id": "last", "prompt": "and the thing", "stop": ["the"], "drafter": "suffix"},
]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked, all.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_line_is_answered_in_order(
    anabranch: Anabranch, where: list[object], model: Model, asked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out.jsonl"
    done = anabranch("generate", *where, "--prompts", asked, "--out", out, "-n", 8)
    assert (done.code, done.out) == (1, "")
    records = rows(out)
    assert [row["id"] for row in records] == [1, "chat", "ids", 4, "two", "empty", "bad", "rows", "last"]
    said = {row["id"]: row["error"] for row in records if "error" in row}
    assert set(said) == {4, "two", "empty", "bad", "rows"}
    assert "line 4 of" in said[4]
    assert "needs one of prompt, messages, token_ids, got prompt and token_ids" in said["two"]
    assert "the prompt must be a text that is not empty" in said["empty"]
    assert "temperature" in said["bad"]
    assert "rows is no option of a line" in said["rows"]
    by_id = {row["id"]: row for row in records}
    question = [{"role": "user", "content": "the thing"}]
    assert by_id[1]["token_ids"] == model.chat(question, max_new_tokens=8).token_ids
    assert by_id["chat"]["text"] == model.chat([{"role": "user", "content": "one two"}], max_new_tokens=5).text
    assert by_id["ids"]["token_ids"] == model.generate([5, 6, 7], max_new_tokens=8, temperature=1.0, seed=4).token_ids
    assert by_id["last"]["drafter"] == "suffix"
    assert "9 answers in" in done.err


def test_it_continues_after_an_interruption(
    anabranch: Anabranch, where: list[object], asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = ("generate", *where, "--prompts", asked, "-n", 6)
    anabranch(*command, "--out", whole)
    whole_append, left = generate_batch._Output.append, [3]

    def stop(self: Any, record: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        whole_append(self, record)

    with monkeypatch.context() as context:
        context.setattr(generate_batch._Output, "append", stop)
        stopped = anabranch(*command, "--out", out)
    assert stopped.code == 130
    assert "stopped after 3 of 9 prompts; the same command continues" in stopped.err
    with open(out, "a", encoding="utf-8") as file:
        file.write('{"id": "two", "te')  # cut off
    again = anabranch(*command, "--out", out)
    assert "continuing after 3 of 9 prompts" in again.err
    assert out.read_text() == whole.read_text()
    assert "continuing after 9 of 9" in anabranch(*command, "--out", out).err
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "x"}\n')
    refused = anabranch("generate", *where, "--prompts", other, "--out", out)
    assert (refused.code, "has other answers" in " ".join(refused.err.split())) == (1, True)
    assert anabranch("generate", *where, "--prompts", other, "--out", out, "-n", 2, "--force").code == 0
    assert len(rows(out)) == 1


def test_standard_input_and_output(anabranch: Anabranch, where: list[object]) -> None:
    done = anabranch("generate", *where, "--prompts", "-", "--out", "-", "-n", 3, stdin='{"prompt": "the"}\n')
    assert (done.code, json.loads(done.out)["id"]) == (0, 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_prompts_from_a_pipe(
    anabranch: Anabranch, where: list[object], tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(pack(b'{"prompt": "the"}\n'),))
    writer.start()
    done = anabranch("generate", *where, "--prompts", pipe, "-n", 3)
    writer.join()
    assert (done.code, json.loads(done.out)["id"]) == (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(FileError, match=r"cannot be written .*No space left on device.*the same command continues"):
        append(Path("/dev/full"), {"id": 1})


def test_a_line_that_is_cut_off_by_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    """In another process, whose files may have 24 bytes: one whole line."""
    code = f"""if True:
        import resource, signal
        from pathlib import Path
        from anabranch.errors import FileError
        from anabranch.support.appended import append
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (24, 24))
        append(Path({str(tmp_path / "out")!r}), {{"id": 1, "text": "a"}})
        try:
            append(Path({str(tmp_path / "out")!r}), {{"id": 2, "text": "b"}})
        except FileError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "its lines so far are kept" in done.stdout
    assert rows(tmp_path / "out") == [{"id": 1, "text": "a"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', "line 2 of"), ("\n\n", "has no prompts")],
)
def test_files_that_are_refused(anabranch: Anabranch, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    done = anabranch("generate", "--prompts", path)
    assert (done.code, said in " ".join(done.err.split())) == (1, True)


@pytest.mark.parametrize(
    "words", [("hello", "--prompts", "a"), ("hello", "--out", "a"), ("hello", "--stream"), ("--prompts", "a", "--json")]
)
def test_contradictory_options(anabranch: Anabranch, words: tuple[str, ...]) -> None:
    done = anabranch("generate", *words)
    assert done.code == 1
    assert ("--json" in words) == ("error" in done.out)


def test_json_streams_a_line_for_each_chunk(anabranch: Anabranch, where: list[object]) -> None:
    words = ("generate", *where, "the thing", "-n", 12, "--drafter", "suffix", "--json")
    *chunks, last = map(json.loads, anabranch(*words, "--stream").out.splitlines())
    whole = json.loads(anabranch(*words).out)
    assert len(chunks) > 1
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] == last["result"]["text"]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
