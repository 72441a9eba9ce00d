"""The loop itself, with one row and with several, on contenders whose speed and output are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from anabranch.bench.run import Answer, Encoded, Load, Ours, Outcome, Round, one_by_one, rounds, warm_up
from anabranch.bench.suites import SuitePrompt
from anabranch.bench.summary import ContenderAnswers, gather, quartiles, summarise, summarise_rows
from anabranch.decoding.engine import Request
from anabranch.decoding.stats import Stats
from anabranch.methods import make_drafter
from small import as_target, decode, prompt, small

PROMPTS: list[Encoded] = [(SuitePrompt(str(i), "ab"[i % 2], "?"), [1, 2, i]) for i in range(4)]


class Known:
    """Emits the same tokens at a known rate, the first after a tenth of a second; breaks after ``breaks`` calls."""

    def __init__(self, rate: float, *, breaks: int | None = None, tells_first: bool = True) -> None:
        self.rate, self.breaks, self.tells_first = rate, breaks, tells_first
        self.calls: list[tuple[list[list[int]], int, int]] = []

    def serve(self, prompts: Sequence[Sequence[int]], *, rows: int, max_new_tokens: int) -> Outcome:
        self.calls.append(([list(ids) for ids in prompts], rows, max_new_tokens))
        if self.breaks is not None and len(self.calls) > self.breaks:
            raise RuntimeError("it broke\nbadly")
        seconds = max_new_tokens / self.rate
        arrivals = [(0.1, 1), (seconds, max_new_tokens - 1)] if self.tells_first else []
        return Outcome([Answer([7] * max_new_tokens, seconds, arrivals) for _ in prompts], seconds)


def measured(contenders: dict[str, Known], **options: Any) -> list[ContenderAnswers]:
    return gather(list(contenders), list(rounds(contenders, one_by_one(PROMPTS), **options)), {})


def records(contenders: dict[str, Known], *, max_new_tokens: int = 20, **options: Any) -> list[dict[str, Any]]:
    repeats = options.pop("repeats", 1)
    return summarise(measured(contenders, max_new_tokens=max_new_tokens, repeats=repeats), PROMPTS, **options)


def test_ratios_are_to_plain_decoding_on_the_same_prompt() -> None:
    slow, fast = records({"none": Known(10.0), "fast": Known(25.0)}, repeats=2)
    assert slow["speedup_quartiles"] == [1.0, 1.0, 1.0]
    assert fast["speedup_quartiles"] == [2.5, 2.5, 2.5]
    assert (fast["speedup_total"], fast["prompts"], fast["tokens"]) == (2.5, 4, 160)
    assert fast["tokens_per_second"] == fast["tokens_per_second_mean"] == 25.0
    assert fast["tokens_per_second_by_prompt"] == [25.0] * 4
    assert fast["tokens_by_prompt"] == [20] * 4
    assert (fast["equal_outputs"], fast["common_prefix_median"]) == (4, 20)
    assert fast["by_task"]["a"] == {
        "prompts": 2,
        "tokens_per_second": 25.0,
        "speedup_quartiles": [2.5, 2.5, 2.5],
        "speedup_total": 2.5,
    }


def test_clocks_and_the_share_of_the_floor() -> None:
    (record,) = records({"none": Known(10.0)}, floor_ms={"none": 25.0})
    assert record["first_token_ms_quartiles"] == [100.0] * 3
    assert record["token_ms_quartiles"] == [100.0] * 3  # (2 s - 0.1 s) / 19
    assert record["floor_share"] == 0.25
    assert record["step_ms_quartiles"] is None
    assert "floor_share_step" not in record


def test_a_contender_that_does_not_tell_its_first_token() -> None:
    (record,) = records({"none": Known(10.0, tells_first=False)}, floor_ms={"none": 25.0})
    assert record["first_token_ms_quartiles"] is record["token_ms_quartiles"] is None
    assert "floor_share" not in record


def test_contenders_alternate_and_the_order_rotates() -> None:
    seen: list[str] = []

    def report(done: int, total: int, what: str) -> None:
        seen.append(what.split()[0] if what else f"{done}/{total}")

    contenders = {name: Known(1.0) for name in ("none", "b", "c")}
    list(rounds(contenders, one_by_one(PROMPTS), max_new_tokens=4, report=report))
    assert seen[:8] == ["none", "b", "c", "1/4", "b", "c", "none", "2/4"]
    assert [len(c.calls) for c in contenders.values()] == [4, 4, 4]
    seen.clear()
    list(rounds(contenders, one_by_one(PROMPTS[:1]), max_new_tokens=4, repeats=2, report=report))
    assert seen == ["none", "b", "c", "b", "c", "none", "1/1"]


def test_a_run_goes_on_where_it_was_stopped_in_the_order_it_would_have_had() -> None:
    def order(start: int) -> list[str]:
        seen: list[str] = []
        report: Callable[[int, int, str], None] = lambda done, total, what: seen.append(what)  # noqa: E731
        contenders = {"none": Known(1.0), "b": Known(1.0)}
        list(rounds(contenders, one_by_one(PROMPTS), max_new_tokens=2, start=start, report=report))
        return seen

    assert order(0)[-3:] == order(3)


def test_warm_up_is_apart_and_short() -> None:
    good, bad = Known(1.0), Known(1.0, breaks=0)
    loads = [Load(tuple(PROMPTS), 1), Load(tuple(PROMPTS), 2)]
    seconds, errors = warm_up({"good": good, "bad": bad}, loads, max_new_tokens=100)
    assert good.calls == [([[1, 2, 0]], 1, 16), ([[1, 2, 0], [1, 2, 1]], 2, 16)]
    assert set(seconds) == {"good", "bad"}
    assert errors == {"bad": "RuntimeError: it broke badly"}


def test_an_error_is_an_error_and_never_a_timed_answer() -> None:
    bad = Known(9.0, breaks=2)
    summary = records({"none": Known(1.0), "bad": bad}, max_new_tokens=4)
    assert summary[1] == {"name": "bad", "error": "RuntimeError: it broke badly"}
    assert summary[0]["prompts"] == 4
    assert len(bad.calls) == 3, "it is not asked again"
    assert list(rounds({"bad": Known(1.0, breaks=0)}, one_by_one(PROMPTS), max_new_tokens=4))[-1].index == 0, (
        "nobody is left"
    )


def test_a_slow_contender_decodes_some_of_the_prompts_and_is_compared_on_these() -> None:
    slow, every = Known(5.0), {"slow": 3}
    contenders = {"none": Known(10.0), "slow": slow}
    done = list(rounds(contenders, one_by_one(PROMPTS), max_new_tokens=20, every=every))
    assert [prompts for prompts, *_ in slow.calls] == [[[1, 2, 0]], [[1, 2, 3]]]
    plain, strided = summarise(gather(list(contenders), done, {}, every), PROMPTS)
    assert (plain["prompts"], strided["prompts"], strided["every"]) == (4, 2, 3)
    assert strided["speedup_quartiles"] == [0.5] * 3
    assert (strided["speedup_total"], strided["equal_outputs"]) == (0.5, 2)
    assert {task: part["prompts"] for task, part in strided["by_task"].items()} == {"a": 1, "b": 1}
    some = summarise(gather(list(contenders), done[:3], {}, every), PROMPTS[:3])[1]
    assert list(some["by_task"]) == ["a"]


def test_an_answer_without_tokens_is_an_error() -> None:
    class Mute(Known):
        def serve(self, prompts: Sequence[Sequence[int]], *, rows: int, max_new_tokens: int) -> Outcome:
            return Outcome([Answer([], 1.0)], 1.0)

    (record,) = records({"none": Mute(1.0)})
    assert "returned no tokens" in record["error"]


def test_without_a_baseline_there_are_no_ratios() -> None:
    summary = records({"none": Known(1.0, breaks=0), "other": Known(1.0)})
    assert "error" in summary[0]
    assert "speedup_quartiles" not in summary[1]
    assert "equal_outputs" not in summary[1]


def test_other_tokens_are_counted_and_the_common_prefix_measured() -> None:
    def answers(*ids: list[int]) -> list[list[Answer]]:
        return [[Answer(one, 1.0)] for one in ids]

    gathered = [
        ContenderAnswers("none", answers([1, 2, 3], [1, 2, 3], [5, 6], [9])),
        ContenderAnswers("other", answers([1, 2, 3], [1, 2, 4], [5, 6, 7], [8])),
    ]
    other = summarise(gathered, PROMPTS)[1]
    assert (other["equal_outputs"], other["common_prefix_median"]) == (1, 2)
    apart = summarise(gathered, PROMPTS, comparable=lambda name: name == "none")
    assert "equal_outputs" in apart[0]
    assert "equal_outputs" not in apart[1]


def test_quartiles_leave_out_what_is_not_known() -> None:
    assert quartiles([1.0, None, 2.0, 3.0]) == [1.5, 2.0, 2.5]
    assert quartiles([4.0]) == [4.0, 4.0, 4.0]
    assert quartiles([None]) is None


def test_answers_and_counts_survive_being_written() -> None:
    stats = Stats(tokens=5, steps=2, drafted_steps=1, draft_nodes=8, seconds=0.5)
    stats.accepted.update({0: 1, 3: 1})
    stats.sources.update({"streams": 3, "target": 2})
    answer = Answer([1, 2, 3, 4, 5], 0.5, ((0.1, 1), (0.5, 4)), stats)
    assert Answer.from_dict(answer.to_dict()) == answer
    assert (stats.accepted_tokens, stats.acceptance_rate, stats.draft_nodes_per_step) == (3, 3 / 8, 4.0)
    twice = Stats.merged([stats, stats])
    assert (twice.tokens, twice.steps, twice.accepted[3]) == (10, 4, 2)
    assert twice.acceptance_by_depth() == stats.acceptance_by_depth() == [1.0, 1.0, 1.0]
    assert Answer.from_dict(Answer([1], 0.5).to_dict()).stats is None


def test_tokens_that_come_with_the_first_are_not_counted_after_it() -> None:
    assert Answer([1, 2, 3, 4], 1.0, ((0.4, 2), (1.0, 2))).token_seconds == pytest.approx(0.3)
    assert Answer([1, 2], 0.4, ((0.4, 2),)).token_seconds is None


def test_gather_keeps_the_first_error() -> None:
    one = Round(0, 1, {"a": [Outcome((Answer([1], 1.0),), 1.0)]}, {"b": "late"})
    a, b, c = gather(["a", "b", "c"], [one], {"c": "early"})
    assert (a.error, b.error, c.error) == (None, "late", "early")
    assert len(a.answers) == 1


# -- several rows at a time ----------------------------------------------------------------------------------------
def outcome(seconds: float, *texts: list[int]) -> Outcome:
    return Outcome(tuple(Answer(text, seconds, ((0.1, len(text)),)) for text in texts), seconds)


def test_latency_is_shared_by_tokens_that_arrive_together() -> None:
    answer = Answer([1, 2, 3, 4], 1.75, ((0.5, 1), (1.5, 2), (1.75, 1)))
    assert answer.first_token_seconds == 0.5
    assert answer.latencies == [0.5, 0.5, 0.25]


def test_contenders_take_turns_at_each_number_of_rows() -> None:
    fast, bad = Known(1.0), Known(2.0, breaks=1)
    loads = [Load(tuple(PROMPTS), rows) for rows in (1, 3)]
    done = list(rounds({"plain": fast, "other": bad}, loads * 2, max_new_tokens=20))
    assert [(one.index, one.rows) for one in done] == [(0, 1), (1, 3), (2, 1), (3, 3)]
    assert [(len(prompts), rows, most) for prompts, rows, most in fast.calls[:2]] == [(4, 1, 20), (4, 3, 20)]
    assert done[1].errors == {"other": "RuntimeError: it broke badly"}
    assert [list(one.outcomes) for one in done] == [["plain", "other"], ["plain"], ["plain"], ["plain"]]


def test_ratios_are_paired_within_a_round() -> None:
    same, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    done = [
        Round(0, 2, {"none": [outcome(1.0, *same)], "fast": [outcome(0.5, *same)]}),
        Round(1, 2, {"none": [outcome(4.0, *same)], "fast": [outcome(1.0, *other)]}),
    ]
    plain, fast, bad = summarise_rows(done, {"none": "none", "fast": "none", "bad": "none"}, errors={"bad": "why"})
    assert plain["ratio"] == [1.0, 1.0, 1.0]
    assert fast["ratio"] == [2.0, 3.0, 4.0]
    assert fast["tokens_per_second"] == [4.0, 6.0, 8.0]
    assert (plain["equal_outputs"], fast["equal_outputs"]) == (2, 1)
    assert fast["first_token_ms"] == {"median": 100.0, "p95": 100.0}
    assert fast["token_ms"] is None
    assert bad == {"name": "bad", "error": "why"}
    (failed,) = summarise_rows([Round(0, 1, {}, {"fast": "why"})], {"fast": "none"})
    assert failed == {"name": "fast", "error": "why"}


def test_plain_decoding_is_compared_with_itself_at_the_first_number_of_rows() -> None:
    done = [Round(0, 1, {"none": [outcome(1.0, [1], [2])]}), Round(1, 2, {"none": [outcome(1.0, [1], [3])]})]
    assert [record["equal_outputs"] for record in summarise_rows(done, {"none": "none"})] == [2, 1]


def test_rows_decode_what_each_prompt_decodes_alone() -> None:
    target = as_target(small())
    prompts = [prompt(5 + n, n) for n in range(4)]
    stop = frozenset(target.config.eos_token_ids)
    alone, _ = decode(target.decoder, [Request(ids, 9, stop_ids=stop) for ids in prompts])
    for spec in ("none", "prompt_lookup"):
        ours = Ours(target, make_drafter(spec, target.decoder), capacity=30, call={})
        for rows, several in ((2, prompts), (1, prompts[:1])):
            served = ours.serve(several, rows=rows, max_new_tokens=9)
            assert served.texts == alone[: len(several)]
            for answer in served.answers:
                assert answer.stats is not None
                assert 0 < answer.stats.prefill_seconds < answer.arrivals[0][0] <= served.seconds
