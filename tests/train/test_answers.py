"""Answers: the target's own, each once, whatever stops the run; and the readers of prompts, answers and texts."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from anabranch.decoding.engine import Request
from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.learning.examples import Example
from anabranch.sampling import SamplingParams
from anabranch.support.appended import settings_path
from anabranch.support.jsonfiles import has_rows
from anabranch.train.answers import AnswerProgress, EncodedPrompt, check_out, read_prompts, write_answers
from anabranch.train.data import batches, digest, frequent_tokens, read_examples, read_texts, split
from anabranch.train.documents import read_documents
from small import VOCABULARY, Words, as_target, decode, prompt, small
from toy_text import ToyFolders

TARGET = as_target(small())
PROMPTS = [EncodedPrompt(n, "toy", tuple(prompt(1 + n % 9, n))) for n in range(23)]
NEW = 10


def records(path: Path) -> dict[Any, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def write(out: Path, prompts: list[EncodedPrompt] = PROMPTS, **options: Any) -> AnswerProgress:
    return write_answers(TARGET, prompts, out, **{"rows": 4, "max_new_tokens": NEW, **options})


def test_answers_are_plain_greedy_decodings(tmp_path: Path) -> None:
    seen: list[AnswerProgress] = []
    done = write(tmp_path / "deep" / "a.jsonl", report=seen.append)
    requests = [Request(p.ids, NEW, stop_ids=frozenset({2})) for p in PROMPTS]
    wanted, _ = decode(TARGET.decoder, requests)
    found = records(tmp_path / "deep" / "a.jsonl")
    for p, answer in zip(PROMPTS, wanted, strict=True):
        assert found[p.id] == {"id": p.id, "source": "toy", "prompt_ids": list(p.ids), "answer_ids": answer}
    assert done.answers == done.wanted == len(PROMPTS)
    assert done.tokens == sum(map(len, wanted))
    assert [p.answers for p in seen] == list(range(len(PROMPTS) + 1))
    assert seen[-1].seconds_left == 0.0
    with pytest.warns(TrainingWarning, match="rows of .* are left out: .* with a completion of fewer than 2 tokens"):
        examples = read_examples(tmp_path / "deep" / "a.jsonl", vocab_size=VOCABULARY, max_tokens=64)
    assert all(example.source == "toy" for example in examples)


def test_ctrl_c_and_a_torn_line(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    write(whole)

    def stop(progress: AnswerProgress) -> None:
        if progress.answers == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(out, report=stop)
    kept = out.read_text(encoding="utf-8")
    assert kept.count("\n") == 9
    with out.open("a", encoding="utf-8") as file:
        file.write('{"id": 5, "source": "toy", "prom')
    assert write(out).answers == len(PROMPTS)
    assert out.read_text(encoding="utf-8").startswith(kept)
    assert records(out) == records(whole)
    # nothing is left to do, and nothing is done
    again = write(out)
    assert (again.answers, again.tokens) == (len(PROMPTS), 0)
    assert records(out) == records(whole)


def test_sampled_answers_have_a_seed_each_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=4)
    twins = [EncodedPrompt(name, "", tuple(prompt(5))) for name in ("a", "b", "c")]
    write(tmp_path / "1.jsonl", twins, sampling=sampling, rows=1)
    write(tmp_path / "3.jsonl", twins[::-1], sampling=sampling, rows=3)
    found = records(tmp_path / "1.jsonl")
    assert found == records(tmp_path / "3.jsonl")
    assert len({tuple(record["answer_ids"]) for record in found.values()}) == 3


def test_a_file_goes_on_as_it_began(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    write(out, PROMPTS[:3])
    with pytest.raises(FileError, match="max_new_tokens 10, got 11"):
        write(out, max_new_tokens=11)
    with pytest.raises(FileError, match="temperature"):
        write(out, sampling=SamplingParams(temperature=1.0))
    with pytest.raises(FileError, match="fingerprint"):
        write_answers(as_target(small("phi")), PROMPTS, out, max_new_tokens=NEW)
    settings_path(out).unlink()  # nothing is known of it any more
    assert write(out).answers == len(PROMPTS)
    with out.open("a", encoding="utf-8") as file:
        file.write("rubbish\n")
    with pytest.raises(FileError, match=f"line {len(PROMPTS) + 1} "):
        write(out)


def test_a_file_without_a_last_line_end_keeps_its_last_answer(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    write(out, PROMPTS[:3])
    kept = out.read_bytes()
    out.write_bytes(kept.rstrip(b"\n"))
    assert write(out, PROMPTS[:3]).tokens == 0
    assert out.read_bytes() == kept


@pytest.mark.parametrize(
    "content",
    [
        '{"id": 0, "prompt": "w1"}\n{"id": 1, "prompt": "w2"}\n',
        '{"id": 0, "prompt": "w1"}\n{"id": 1, "prompt": "w2"}',
        '{"id": 0, "prompt": "w1"}',
        '{"id": 0, "prompt_ids": [5]}\n{"id": 1, "prom',
        '{"id": [0], "prompt_ids": [5], "answer_ids": [6]}\n',
        '{"id": 0, "prompt_ids": 5, "answer_ids": [6]}\n',
        '{"id": 0, "pro',
        "notes without a line end",
        "notes\nof two lines",
    ],
)
def test_a_file_of_something_else_stays_as_it_is(content: str, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text(content, encoding="utf-8")
    for refused in (lambda: write(out), lambda: check_out(out, tmp_path / "p.jsonl")):
        with pytest.raises(FileError, match=r"is not a completion with id, prompt_ids and answer_ids.*another file"):
            refused()
    assert out.read_text(encoding="utf-8") == content
    assert not settings_path(out).exists()


def test_half_a_line_that_is_not_of_a_run_stays(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    write(out, PROMPTS[:3])
    with out.open("a", encoding="utf-8") as file:
        file.write("my notes")
    with pytest.raises(FileError, match="line 4"):
        write(out)
    assert out.read_text(encoding="utf-8").endswith("\nmy notes")


def test_a_run_that_was_killed_in_its_first_line_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    write(out, PROMPTS[:1])
    out.write_bytes(out.read_bytes()[:20])
    assert write(out).answers == len(PROMPTS)
    assert len(records(out)) == len(PROMPTS)


def test_another_prompt_under_an_id_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    write(out, PROMPTS[:6])
    kept = out.read_bytes()
    inserted = [EncodedPrompt(p.id, p.source, q.ids) for p, q in zip(PROMPTS[3:], PROMPTS[2:], strict=False)]
    with pytest.raises(FileError, match=r"another prompt with the id 3.*another file.*give each prompt an id"):
        write(out, [*PROMPTS[:3], *inserted])
    assert out.read_bytes() == kept
    write(out, PROMPTS[2:8])  # ids of their own: some are gone, others are new
    assert set(records(out)) == set(range(8))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    places = {tmp_path: "is a folder", tmp_path / "file" / "deep" / "a.jsonl": "choose another --out"}
    for out, message in {**places, tmp_path / ("a" * 250): "choose another --out"}.items():
        with pytest.raises(FileError, match=message):
            write(out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not settings_path(tmp_path).exists()


def test_prompts_are_not_written_over(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "w1"})
    (tmp_path / "link.jsonl").symlink_to(path)
    for out in (path, tmp_path / "." / "p.jsonl", tmp_path / "link.jsonl"):
        with pytest.raises(FileError, match="contains the prompts"):
            check_out(out, path)
    check_out(tmp_path / "new" / "a.jsonl", path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.jsonl", "p.jsonl"]


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    done = write(tmp_path / "a.jsonl", longest_prompt=4)
    assert done.wanted == sum(len(p.ids) <= 4 for p in PROMPTS)
    assert set(records(tmp_path / "a.jsonl")) == {p.id for p in PROMPTS if len(p.ids) <= 4}
    with pytest.raises(InputError, match="no prompt"):
        write(tmp_path / "b.jsonl", longest_prompt=0)
    for bad in ({"rows": 0}, {"max_new_tokens": 0}):
        with pytest.raises(InputError, match="at least 1"):
            write(tmp_path / "b.jsonl", **bad)


def test_a_part_of_the_run_is_a_fair_sample(tmp_path: Path) -> None:
    """The first quarter of the answers has short and long prompts alike, whatever their order in the file."""
    from anabranch.train.answers import _ordered

    many = [EncodedPrompt(n, "", (1,) * (1 + n // 4)) for n in range(400)]
    order = list(_ordered(many, 32))
    assert sorted(p.id for p in order) == list(range(400))
    mean = sum(len(p.ids) for p in order[:96]) / 96
    assert mean == pytest.approx(50, rel=0.25)
    jumps = [abs(len(a.ids) - len(b.ids)) for a, b in itertools.pairwise(order)]
    assert sum(jumps) / len(jumps) < 8


# -- readers -----------------------------------------------------------------------------------------------------
def lines(path: Path, *records: Any) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        {"prompt": "w5 w6"},
        {"prompt": "w5 w6", "chat": False, "id": "x", "source": "s"},
        "",
        {"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]},
    )
    found = read_prompts(path, Words())
    assert found == [
        EncodedPrompt(0, "", (3, 5, 6, 4)),
        EncodedPrompt("x", "s", (5, 6)),
        EncodedPrompt(3, "", (3, 7, 4, 3, 8, 4)),
    ]
    assert read_prompts(path, Words(), limit=2) == found[:2]
    bare = Words()
    bare.chat_template = ""
    assert read_prompts(path, bare, limit=1)[0].ids == (5, 6)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 2 .* is not (JSON|a JSON object)"),
        ("[1]", "line 2 .* is not (JSON|a JSON object)"),
        ({"text": "w1"}, "needs a field 'prompt' or 'messages'"),
        ({"prompt": "w1", "messages": []}, "not both"),
        ({"prompt": "w1", "chat": "yes"}, "true or false"),
        ({"prompt": "", "chat": False}, "line 2 .* has no text in the field 'prompt'"),
        ({"prompt": ""}, "line 2 .* has no text in the field 'prompt'"),
        ({"prompt": " \n"}, "line 2 .* has no text in the field 'prompt'"),
        ({"prompt": 5}, "line 2 .* has no text in the field 'prompt'"),
        ({"prompt": ["w1"]}, "line 2 .* has no text in the field 'prompt'"),
        ({"messages": []}, "line 2 .* has no text in the field 'messages'"),
        ({"messages": [{"role": "user", "content": 5}]}, "line 2 .* has no text in the field 'messages'"),
        ({"messages": "w1"}, "not a list of objects with a role and a content"),
        ({"prompt": "\ud800 x"}, r"line 2 .* unpaired surrogate \\ud800 in the field 'prompt'"),
        (
            {"messages": [{"role": "user", "content": "x \udc00"}]},
            r"line 2 .* surrogate \\udc00 in the field 'messages'",
        ),
        ({"prompt": "w1", "source": "\ud800"}, "line 2 .* surrogate .* in the field 'source'"),
        ({"prompt": "w1", "id": 0}, "id 0 of an earlier line"),
        ({"prompt": "w1", "id": [1]}, "neither a number nor a text"),
        ({"messages": [{"role": "user"}]}, "not a list of objects with a role and a content"),
    ],
)
def test_bad_prompts(record: Any, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "w1"}, record)
    with pytest.raises(FileError, match=message):
        read_prompts(path, Words())


def test_a_chat_template_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(Words, "apply_chat_template", refuse)
    with pytest.raises(FileError, match=r"line 1 .* chat template .* refuses this conversation: roles must alternate"):
        read_prompts(lines(tmp_path / "p", {"prompt": "w1"}), Words())


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    def marked(name: str, *records: Any) -> Path:
        path = lines(tmp_path / name, *records)
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
        return path

    assert read_prompts(marked("p.jsonl", {"prompt": "w5"}), Words())[0].ids == (3, 5, 4)
    answer = {"id": 0, "prompt_ids": list(PROMPTS[0].ids), "answer_ids": [3, 4]}
    path = marked("a.jsonl", answer)
    assert write(path, PROMPTS[:1]).tokens == 0
    assert read_examples(path, vocab_size=VOCABULARY, max_tokens=9)[0].answer_ids == (3, 4)
    text = " ".join(f"w{i}" for i in range(12))
    for path in (marked("t.jsonl", {"text": text}), marked("t.txt", text)):
        assert read_texts(path, Words(), max_tokens=14)[0].prompt_ids[0] == 0


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no file"):
        read_prompts(tmp_path / "nowhere", Words())
    with pytest.raises(FileError, match="no prompts"):
        read_prompts(lines(tmp_path / "empty"), Words())
    with pytest.raises(InputError, match="limit"):
        read_prompts(lines(tmp_path / "p", {"prompt": "w1"}), Words(), limit=0)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe4"}\n')
    with pytest.raises(FileError, match="UTF-8"):
        read_prompts(tmp_path / "latin", Words())
    bare = Words()
    bare.chat_template = ""
    with pytest.raises(FileError, match="no chat template"):
        read_prompts(lines(tmp_path / "p", {"prompt": "w1", "chat": True}), bare)


def test_examples(tmp_path: Path) -> None:
    good = {"prompt_ids": [1, 2], "answer_ids": [3, 4, 5], "source": "s"}
    path = lines(tmp_path / "a", good, "", {**good, "answer_ids": [3]}, {**good, "prompt_ids": []})
    dropped = "2 of 3 rows of .* are left out: 1 with a completion of fewer than 2 tokens, 1 without a prompt"
    with pytest.warns(TrainingWarning, match=dropped):
        assert read_examples(path, vocab_size=9, max_tokens=9) == [Example((1, 2), (3, 4, 5), "s")]
    assert read_examples(lines(tmp_path / "c", good), vocab_size=9, max_tokens=4)[0].answer_ids == (3, 4)
    for bad, message in (("{", "line 2"), ({"prompt_ids": [1]}, "line 2"), ({**good, "answer_ids": [9, 1]}, "outside")):
        with pytest.raises(FileError, match=message):
            read_examples(lines(tmp_path / "b", good, bad), vocab_size=9, max_tokens=9)
    wrong = lines(tmp_path / "d", good, {"prompt": "x", "completion": "y"}, good, {})
    with pytest.raises(FileError, match=r"line 2 of .*; it has prompt and completion: give .*; 1 more of 4 rows .*: 4"):
        read_examples(wrong, vocab_size=9, max_tokens=9)
    with pytest.raises(FileError, match="no prompt with a completion"):
        read_examples(path, vocab_size=9, max_tokens=2)
    (tmp_path / "b").write_text(json.dumps(good), encoding="utf-16")
    with pytest.raises(FileError, match="cannot be read as UTF-8"):
        read_examples(tmp_path / "b", vocab_size=9, max_tokens=9)
    with pytest.raises(FileError, match="train answers"):
        read_examples(tmp_path / "nowhere", vocab_size=9, max_tokens=9)


def test_texts(tmp_path: Path) -> None:
    text = " ".join(f"w{i}" for i in range(19)) + "\n" + "w1 " * 12
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    found = read_texts(tmp_path / "t.txt", Words(), max_tokens=14, prompt_tokens=3)
    ids = [*range(19), *[1] * 12]
    assert [(*e.prompt_ids, *e.answer_ids) for e in found] == [tuple(ids[:14]), tuple(ids[14:28])]
    assert {len(e.prompt_ids) for e in found} == {3}
    assert {e.source for e in found} == {"t"}
    path = lines(tmp_path / "t.jsonl", {"text": text, "source": "s"}, {"text": "w1\u2028 w2"})
    with pytest.warns(TrainingWarning, match="1 of 2 rows of .* are left out: 1 with a text of fewer than 10 tokens"):
        assert {e.source for e in read_texts(path, Words(), max_tokens=14)} == {"s"}
    for content, message in (
        ("{}\n", "line 1"),
        ("[]\n", "no text of at least 10 tokens"),
        ('["w1"]\n', "item 1"),
        (
            '{"prompt": "w1", "completion": "w2"}\n',
            "completion; it has prompt and completion: give",
        ),
        ('{"text": "\\ud800"}\n', r"line 1 .* contains the unpaired surrogate \\ud800"),
        ('{"text": "w1"}\n', "at least 10 tokens"),
    ):
        (tmp_path / "t.jsonl").write_text(content, encoding="utf-8")
        with pytest.raises(FileError, match=message):
            read_texts(tmp_path / "t.jsonl", Words(), max_tokens=14)
    with pytest.raises(FileError, match="no file"):
        read_texts(tmp_path / "nowhere", Words(), max_tokens=14)


TEXTS = [" ".join(f"w{i}" for i in range(n, n + 12)) for n in (0, 3)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
TABLE = "text,source\r\n" + "".join(f'"{text}",s\r\n' for text in TEXTS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", LINES.encode()),
        ("t.ndjson", LINES.encode()),
        ("t.JSONL", LINES.encode()),
        ("t.txt", LINES.encode()),
        ("t", LINES.encode()),
        ("t.jsonl", LINES.encode("utf-8-sig")),
        ("t.jsonl", LINES.replace("\n", "\r\n").encode()),
        ("t.jsonl", ("\n\n" + LINES).encode()),
        ("t.jsonl.gz", gzip.compress(LINES.encode())),
        ("t.gz", gzip.compress(LINES.encode("utf-8-sig"))),
        ("t.jsonl", gzip.compress(LINES.encode())),
        ("t.json", json.dumps([{"text": text} for text in TEXTS], indent=1).encode()),
        ("t.data", json.dumps([{"text": text} for text in TEXTS]).encode()),
        ("t.csv", TABLE.encode()),
        ("t.CSV.gz", gzip.compress(TABLE.encode("utf-8-sig"))),
        ("t.tsv", TABLE.replace('"', "").replace(",", "\t").encode()),
    ],
    ids=itertools.count(),
)
def test_rows_of_text_are_known_by_their_content(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = read_texts(path, Words(), max_tokens=14)
    assert [(*e.prompt_ids, *e.answer_ids) for e in found] == [tuple(range(n, n + 12)) for n in (0, 3)]
    documents = read_documents(TARGET, text=path)
    assert [[*ids] for ids in documents] == [[*range(n, n + 12)] for n in (0, 3)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.txt", TEXTS[0].encode()),
        ("t.txt.gz", gzip.compress(TEXTS[0].encode("utf-8-sig"))),
        ("t.md", b"\r\n" + TEXTS[0].encode() + b"\r\n"),
    ],
    ids=itertools.count(),
)
def test_any_other_file_is_one_text(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (found,) = read_texts(tmp_path / name, Words(), max_tokens=14)
    assert (*found.prompt_ids, *found.answer_ids) == tuple(range(12))


@pytest.mark.parametrize("text", ["[1] w1 w2", '["w1"] w2', "{w1} w2", '{"text":\n"w1"}', "{}{} w1"])
def test_text_that_begins_like_json_is_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    assert not has_rows(tmp_path / "t.txt")


def test_splitting_batching_and_counting() -> None:
    many = [Example((1, n % 5), tuple(prompt(2 + n % 30, n))) for n in range(60)]
    training, held_out = split(many, 3)
    assert len(held_out) == 3
    assert not {e.prompt_ids for e in training} & {e.prompt_ids for e in held_out}
    assert split(many, 0) == (split(many, 0)[0], [])
    for bad in (-1, 60):
        with pytest.raises(InputError, match="held_out"):
            split(many, bad)
    groups = [list(batches(many, 100, seed=seed)) for seed in (0, 0, 1, 2)]
    # an exact resume counts on it: every epoch has as many batches
    assert len({len(epoch) for epoch in groups}) == 1
    assert [b.tokens_BT.tolist() for b in groups[0]] == [b.tokens_BT.tolist() for b in groups[1]]
    for epoch in groups:
        assert sum(b.size for b in epoch) == 60
        assert all(b.tokens_BT.numel() <= 100 for b in epoch)
    assert digest(many) == digest(list(many)) != digest(many[::-1])
    assert digest([Example((1,), (2, 3))]) != digest([Example((1, 2), (3,))])
    common = frequent_tokens([Example((9,), (5, 5, 7, 7, 7, 8))], 4, 12, always=(11, 40))
    assert common.tolist() == [5, 7, 8, 11]
    assert frequent_tokens([], 3, 12).tolist() == [0, 1, 2]
    assert replace(many[0], source="x").source == "x"


def test_parts_of_the_prompts_have_the_answers_of_all(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    write(tmp_path / "whole.jsonl", sampling=sampling)
    found: dict[Any, dict[str, Any]] = {}
    for number in range(3):
        write(tmp_path / f"{number}.jsonl", PROMPTS[number::3], sampling=sampling)
        found |= records(tmp_path / f"{number}.jsonl")
    assert found == records(tmp_path / "whole.jsonl")
    lines = [json.dumps(record) for record in list(found.values())[1:]]
    (tmp_path / "joined.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert write(tmp_path / "joined.jsonl", sampling=sampling).tokens == len(found[0]["answer_ids"])
    assert records(tmp_path / "joined.jsonl") == found


@pytest.mark.thorough
def test_a_process_that_is_killed_loses_nothing(toys: ToyFolders, tmp_path: Path) -> None:
    given = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"the {number} thing"} for number in range(48)]
    given.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    common = ("--model", toys.model, "--prompts", given, "--temperature", 1, "--seed", 3, "--rows", 2)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"

    def start(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "anabranch", "train", "answers", *map(str, (*common, "--out", path))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    one, killed = start(whole), start(out)
    while not (out.is_file() and out.stat().st_size) and killed.poll() is None:
        time.sleep(0.002)
    killed.kill()
    killed.communicate()
    again = [start(out) for _ in range(2)]
    outcomes = sorted((process.wait(300), process.communicate()[0]) for process in again)
    assert outcomes[0][0] == 0
    assert outcomes[1][0] == 0 or "another process writes to" in outcomes[1][1]
    said, _ = one.communicate(timeout=300)
    assert one.returncode == 0, said
    assert records(out) == records(whole)


def test_two_at_once_do_not_write_to_one_file(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"

    def second(_: AnswerProgress) -> None:
        with pytest.raises(FileError, match="another process writes to"):
            write(out)

    write(out, PROMPTS[:2], report=second)
    assert len(records(out)) == 2
