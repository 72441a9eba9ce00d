"""Throughput of several rows at a time: what is counted, who is compared with whom, and the verb on toys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from anabranch.bench.machine import measure_machine
from anabranch.bench.throughput import Answer, Ours, Round, Served, check_rows, rounds, summarise
from anabranch.decoding.engine import Request
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import make_drafter
from anabranch.sampling import SamplingParams
from small import as_target, decode, prompt, small
from toy_text import ToyFolders
from verbs import Anabranch


def answer(*arrivals: tuple[float, list[int]]) -> Answer:
    found = Answer()
    for seconds, tokens in arrivals:
        found.add(seconds, tokens)
    return found


def served(seconds: float, *texts: list[int]) -> Served:
    return Served([answer((0.1, text)) for text in texts], seconds)


def test_latency_is_shared_by_tokens_that_arrive_together() -> None:
    found = answer((0.5, [1]), (0.75, []), (1.5, [2, 3]), (1.75, [4]))
    assert found.first_token_seconds == 0.5
    assert found.token_seconds == [0.5, 0.5, 0.25]
    assert found.token_ids == [1, 2, 3, 4]


class Fake:
    """Answers each prompt with its tokens, in the seconds it is given; fails where it is told to."""

    def __init__(self, seconds: float, fails_at: int = 0) -> None:
        self.seconds, self.fails_at = seconds, fails_at
        self.calls: list[tuple[int, int, int]] = []

    def serve(self, prompts: Sequence[Sequence[int]], *, rows: int, max_new_tokens: int) -> Served:
        self.calls.append((len(prompts), rows, max_new_tokens))
        if rows == self.fails_at:
            raise CapabilityError("no more rows")
        return served(self.seconds, *(list(ids)[:max_new_tokens] for ids in prompts))


PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_contenders_take_turns_after_a_warm_up_at_each_number_of_rows() -> None:
    fast, slow = Fake(1.0), Fake(2.0, fails_at=3)
    done = list(rounds({"plain": fast, "other": slow}, PROMPTS, [1, 3], max_new_tokens=20, repeats=2))
    assert [(one.repeat, one.rows) for one in done] == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert fast.calls[:4] == [(1, 1, 8), (3, 1, 20), (3, 3, 8), (3, 3, 20)]
    assert done[1].errors == {"other": "no more rows"}
    assert slow.calls == [(1, 1, 8), (3, 1, 20), (3, 3, 8)]
    assert [list(one.runs) for one in done] == [["plain", "other"], ["plain"], ["plain"], ["plain"]]


def test_ratios_are_paired_within_a_repeat() -> None:
    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    done = [
        Round(0, 2, {"none": served(1.0, *same), "fast": served(0.5, *same)}),
        Round(1, 2, {"none": served(4.0, *same), "fast": served(1.0, *other)}),
    ]
    plain, fast = summarise(done, {"none": "none", "fast": "none"})
    assert plain["ratio"] == [1.0, 1.0, 1.0]
    assert fast["ratio"] == [2.0, 3.0, 4.0]
    assert fast["tokens_per_second"] == [4.0, 6.0, 8.0]
    assert (plain["equal_outputs"], fast["equal_outputs"]) == (2, 1)
    assert fast["first_token_ms"] == {"median": 100.0, "p95": 100.0}
    assert fast["token_ms"] is None
    (failed,) = summarise([Round(0, 1, {}, {"fast": "why"})], {"fast": "none"})
    assert failed == {"name": "fast", "error": "why"}


def test_plain_decoding_is_compared_with_itself_at_the_first_number_of_rows() -> None:
    done = [Round(0, 1, {"none": served(1.0, [1], [2])}), Round(0, 2, {"none": served(1.0, [1], [3])})]
    assert [record["equal_outputs"] for record in summarise(done, {"none": "none"})] == [2, 1]


@pytest.mark.parametrize(("rows", "why"), [([0], "at least 1, got 0"), ([4], "needs at least 4"), ([2, 2], "twice")])
def test_numbers_of_rows_are_checked(rows: list[int], why: str) -> None:
    with pytest.raises(InputError, match=why):
        check_rows(rows, 3)


def test_rows_decode_what_each_prompt_decodes_alone() -> None:
    target = as_target(small())
    prompts = [prompt(5 + n, n) for n in range(4)]
    stop = frozenset(target.config.eos_token_ids)
    alone, _ = decode(target.decoder, [Request(ids, 9, stop_ids=stop) for ids in prompts])
    for spec in ("none", "prompt_lookup"):
        ours = Ours(target, make_drafter(spec, target.decoder), SamplingParams())
        found = ours.serve(prompts, rows=2, max_new_tokens=9)
        assert [one.token_ids for one in found.answers] == alone
        assert all(0 < one.first_token_seconds <= found.seconds for one in found.answers)


@pytest.fixture
def where(toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    (tmp_path / "suite.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("the thing", "other", "a")))
    quick = partial(measure_machine, buffer_bytes=2**20, repeats=2)
    monkeypatch.setattr("anabranch.bench.machine.measure_machine", quick)
    monkeypatch.setattr("anabranch.bench.machine.SIDE", {"cpu": 64})
    start = ["bench", "--model", toys.model, "--adapter", toys.adapter, "--dtype", "float32", "--raw"]
    return [*start, "--suite", tmp_path / "suite.jsonl", "-n", 6, "--rows", 1, "--rows", 2]


@pytest.mark.thorough  # the peer is a process with PyTorch
def test_the_verb_measures_ours_and_a_peer(anabranch: Anabranch, where: list[object], tmp_path: Path) -> None:
    out = tmp_path / "result"
    done = anabranch(*where, "--method", "auto", "--peer", "transformers", "--repeats", 2, "--out", out)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["kind"], result["complete"], result["run"]["rows"]) == ("throughput", True, [1, 2])
    found = {(record["name"], record["rows"]): record for record in result["results"]}
    assert list(found) == [(name, rows) for name in ("none", "auto", "transformers") for rows in (1, 2)]
    for record in found.values():
        assert record["equal_outputs"] == record["prompts"] == 3, record
        assert 0 < record["ratio"][0] <= record["ratio"][1] <= record["ratio"][2]
        assert record["first_token_ms"]["median"] > 0
    assert "TTFT" in done.out
    again = anabranch(*where, "--method", "auto", "--out", out)
    assert "exists already" in again.err


def test_quantized_weights_have_a_plain_decoding_of_their_own(anabranch: Anabranch, where: list[object]) -> None:
    done = anabranch(*where, "--method", "auto", "--quantize", "int8", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [entry["name"] for entry in result["contenders"]] == ["none@int8", "auto@int8"]
    assert {entry["weights"] for entry in result["contenders"]} == {"int8"}
    assert all(record["equal_outputs"] == 3 for record in result["results"])


def test_what_rows_cannot_measure_is_refused_before_loading(anabranch: Anabranch, where: list[object]) -> None:
    assert "--rows measures throughput, so --resume has no effect" in anabranch(*where, "--resume").err
    assert "--rows 9 needs at least 9 prompts, got 3" in anabranch(*where, "--rows", 9).err
    refused = anabranch(*where, "--peer", "transformers-lookup")
    assert (refused.code, "cannot measure it" in refused.err) == (1, True)
