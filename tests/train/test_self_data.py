"""Data that a target writes itself: where its prompts begin, which are kept, and how far a run gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.train.advice import fit_scaling
from anabranch.train.answers import read_prompts
from anabranch.train.self_data import DataProgress, SelfData, check_self_data, write_self_data
from anabranch.train.self_prompts import (
    SOURCE,
    OpenTurn,
    PromptProgress,
    check_prompts,
    in_words,
    open_turn,
    write_prompts,
)
from anabranch.train.sieve import REASONS, Sieve
from small import Words, as_target, small
from toy_text import byte_tokenizer

TARGET = as_target(small())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- where a prompt begins ---------------------------------------------------------------------------------------
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>a\n"
LLAMA2 = "{% for m in messages %}<s>[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
MUTE = "{% for m in messages %}{{ m['role'] }}{% endfor %}"


def templated(template: str, *special: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def turn_of(tokenizer: Any, **changes: Any) -> OpenTurn:
    from dataclasses import replace

    return open_turn(replace(TARGET, tokenizer=tokenizer, config=replace(TARGET.config, **changes)))


def test_the_open_turn_of_a_template_is_found_in_its_text() -> None:
    marks = templated(CHATML, "<|im_start|>", "<|im_end|>")
    turn = turn_of(marks)
    assert marks.decode(turn.ids) == "<|im_start|>user\n"
    assert turn.chat
    assert turn.stop == ""
    assert turn.stop_ids == {2, marks.convert_tokens_to_ids("<|im_end|>")}
    # without a special token, a text ends the turn; a space before the prompt belongs to the prompt
    turn = turn_of(templated(LLAMA2))
    assert byte_tokenizer().decode(turn.ids) == "<s>[INST]"
    assert (turn.stop, turn.stop_ids) == ("[/INST]", {2})


def test_a_base_model_begins_with_its_start_token() -> None:
    bare = Words()
    bare.chat_template = ""
    assert turn_of(bare, bos_token_id=1) == OpenTurn((1,), False, frozenset({2}))
    assert turn_of(bare, bos_token_id=None).ids == (2,), "the end token also begins a text"
    with pytest.raises(CapabilityError, match=r"toy has neither a chat template nor a start token.*give prompts"):
        turn_of(bare, bos_token_id=None, eos_token_ids=())
    with pytest.raises(CapabilityError, match=r"does not show where a user's turn begins.*give prompts"):
        turn_of(templated(MUTE))


# -- which prompts are kept --------------------------------------------------------------------------------------
def test_the_sieve_says_why() -> None:
    tokenizer = templated(CHATML, "<|im_end|>")
    sieve = Sieve(tokenizer, frozenset({tokenizer.convert_tokens_to_ids("<|im_end|>")}))
    tale = "Write a short tale about a fox who learns to read in the library of an old castle by the sea."
    assert sieve.judge(tale, cut=False) == ""
    assert sieve.judge(tale, cut=True) == "cut"
    assert sieve.judge("?! a", cut=False) == "empty"
    assert sieve.judge("what does <|im_end|> mean in a chat?", cut=False) == "markup"
    assert sieve.judge("I am what I am. " * 20, cut=False) == "repetitive"
    assert sieve.judge(tale.upper().replace(" ", "  "), cut=False) == "duplicate"
    assert sieve.judge(tale.replace("old castle", "castle"), cut=False) == "near-duplicate"
    assert sieve.judge("Write a short tale about a dog that counts stars, and end with a moral.", cut=False) == ""
    other = Sieve(tokenizer, frozenset())
    other.keep(tale)
    assert other.judge(tale, cut=False) == "duplicate", "what an earlier run kept counts too"


def test_reasons_in_words() -> None:
    assert in_words({"duplicate": 1200, "cut": 3}) == "3 cut, 1,200 duplicate"
    assert in_words({}) == "none dropped"


# -- writing -----------------------------------------------------------------------------------------------------
def test_prompts_are_written_once_whatever_stops_the_run(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    done = write_prompts(TARGET, whole, 12, rows=4)
    found = lines(whole)
    assert done.kept == sum("dropped" not in line for line in found) >= 12
    assert done.sampled == len(found) == len({line["id"] for line in found})
    assert sum(done.dropped.values()) == done.sampled - done.kept
    assert {line.get("dropped", "cut") for line in found} <= set(REASONS)
    assert all("w4" not in line["prompt"].split() for line in found), "w4 ends a turn"

    def stop(now: PromptProgress) -> None:
        if now.sampled == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prompts(TARGET, part, 12, rows=4, report=stop)
    with part.open("a", encoding="utf-8") as file:
        file.write('{"id": 5, "source": "self-wr')
    again = write_prompts(TARGET, part, 12, rows=4)
    assert again.kept >= 12
    texts = {line["id"]: line["prompt"] for line in found}
    assert all(line["prompt"] == texts[line["id"]] for line in lines(part) if line["id"] in texts)
    kept = part.read_bytes()
    assert write_prompts(TARGET, part, 12, rows=4).tokens == 0
    assert part.read_bytes() == kept
    prompts = read_prompts(part, TARGET.tokenizer, limit=12)
    assert len(prompts) == 12
    assert {prompt.source for prompt in prompts} == {SOURCE}


def test_a_base_model_writes_beginnings_of_texts(tmp_path: Path) -> None:
    from dataclasses import replace

    bare = Words()
    bare.chat_template = ""
    base = replace(TARGET, tokenizer=bare, config=replace(TARGET.config, bos_token_id=1))
    done = write_prompts(base, tmp_path / "p.jsonl", 6, rows=3)
    assert "cut" not in done.dropped
    lengths = [len(prompt.ids) for prompt in read_prompts(tmp_path / "p.jsonl", bare)]
    assert len(set(lengths)) > 1
    assert max(lengths) <= 64


def test_prompts_that_go_on_otherwise_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    write_prompts(TARGET, out, 2, rows=2)
    with pytest.raises(FileError, match="started with seed 0, got 1"):
        write_prompts(TARGET, out, 2, rows=2, seed=1)
    with pytest.raises(FileError, match="fingerprint"):
        write_prompts(as_target(small("phi")), out, 2, rows=2)
    for bad in ({"count": 0}, {"count": 1, "rows": 0}):
        with pytest.raises(InputError, match="must be at least 1, got 0"):
            write_prompts(TARGET, tmp_path / "q.jsonl", **bad)
    foreign = tmp_path / "notes.jsonl"
    for text in ("notes\n", '{"id": 0, "prompt": "w1", "dropped": "dull"}\n', '{"id": 0}\n'):
        foreign.write_text(text, encoding="utf-8")
        with pytest.raises(FileError, match=r"line 1 of .* is not a prompt that the model wrote"):
            check_prompts(foreign)
        assert foreign.read_text(encoding="utf-8") == text


def test_a_model_that_writes_nothing_usable_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sieve, "judge", lambda *_, **__: "repetitive")
    monkeypatch.setattr("anabranch.train.self_prompts.SAMPLES", 20)
    with pytest.raises(CapabilityError, match=r"only 0 of 20 prompts that toy wrote are usable \(20 repetitive\)"):
        write_prompts(TARGET, tmp_path / "p.jsonl", 5, rows=4)


@pytest.mark.thorough
def test_data_are_written_until_the_budget(tmp_path: Path) -> None:
    seen: list[DataProgress] = []
    plan = SelfData(tokens=300, rows=4, max_new_tokens=12)
    out = write_self_data(TARGET, tmp_path / "data", plan, report=seen.append)
    answers = lines(out)
    total = sum(len(line["answer_ids"]) for line in answers)
    assert 300 <= total < 600
    assert {now.stage for now in seen} == {"prompts", "answers"}
    assert (seen[-1].tokens, seen[-1].answers) == (total, len(answers))
    assert seen[-1].seconds_left == 0.0
    kept = out.read_bytes()
    write_self_data(TARGET, tmp_path / "data", plan, report=seen.append)
    assert out.read_bytes() == kept
    more = write_self_data(TARGET, tmp_path / "data", SelfData(tokens=total + 50, rows=4, max_new_tokens=12))
    assert more.read_bytes().startswith(kept), "a larger budget keeps what there is"
    before = (tmp_path / "data" / "prompts.jsonl").read_bytes()
    with pytest.raises(FileError, match="temperature"):
        write_self_data(TARGET, tmp_path / "data", SelfData(9999, rows=4, max_new_tokens=12, temperature=1.0))
    assert (tmp_path / "data" / "prompts.jsonl").read_bytes() == before
    sampled = write_self_data(TARGET, tmp_path / "warm", SelfData(60, rows=4, max_new_tokens=12, temperature=1.0))
    settings = json.loads(sampled.with_name("answers.jsonl.settings.json").read_text(encoding="utf-8"))
    assert settings["temperature"] == 1.0


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("notes\n", encoding="utf-8")
    with pytest.raises(FileError, match="is not a completion"):
        check_self_data(tmp_path)
    with pytest.raises(InputError, match="tokens must be at least 1, got 0"):
        SelfData(tokens=0)
    with pytest.raises(InputError, match="temperature"):
        SelfData(temperature=-1.0)


# -- whether more data pay ---------------------------------------------------------------------------------------
def test_the_curve_of_data() -> None:
    exact = fit_scaling([(n, 3 - 10 * n**-0.5) for n in (1e3, 2e3, 4e3, 8e3, 1e4)])
    assert exact is not None
    assert exact.doubling == pytest.approx(0.1 * (1 - 2**-0.5), rel=0.05)
    assert exact.a == pytest.approx(3.0, abs=0.01)
    until = exact.pays_until(0.01)
    assert until is not None
    assert exact.at(2 * until) - exact.at(until) < 0.01 * exact.at(until)
    assert exact.at(until) - exact.at(until / 2) >= 0.01 * exact.at(until / 2) or until == exact.tokens
    falling = fit_scaling([(1e3, 3.0), (2e3, 2.9), (3e3, 2.8), (4e3, 2.7)])
    assert falling is not None
    assert falling.doubling == 0.0
    assert fit_scaling([(1e3, 2.0), (2e3, 2.1), (3e3, 2.2)]) is None
