"""The harness itself, on contenders whose speed and output are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from anabranch.bench.contenders import Run
from anabranch.bench.run import Answer, ContenderAnswers, Encoded, Round, gather, rounds, warm_up
from anabranch.bench.suites import SuitePrompt
from anabranch.bench.summary import quartiles, summarise
from anabranch.decoding.stats import Stats

PROMPTS: list[Encoded] = [(SuitePrompt(str(i), "ab"[i % 2], "?"), [1, 2, i]) for i in range(4)]


class Known:
    """Emits the same tokens at a known rate, the first after a tenth of a second; breaks after ``breaks`` calls."""

    def __init__(self, rate: float, *, breaks: int | None = None, token: int = 7, tells_first: bool = True) -> None:
        self.name = "known"
        self.rate, self.breaks, self.token, self.tells_first = rate, breaks, token, tells_first
        self.calls: list[tuple[list[int], int]] = []

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        self.calls.append((list(prompt_ids), max_new_tokens))
        if self.breaks is not None and len(self.calls) > self.breaks:
            raise RuntimeError("it broke\nbadly")
        tokens = [self.token] * max_new_tokens
        return Run(tokens, len(tokens) / self.rate, first_token_seconds=0.1 if self.tells_first else None)


def measured(contenders: dict[str, Known], **options: Any) -> list[ContenderAnswers]:
    return gather(list(contenders), list(rounds(contenders, PROMPTS, **options)), {})


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
    list(rounds(contenders, PROMPTS, max_new_tokens=4, report=report))
    assert seen[:8] == ["none", "b", "c", "1/4", "b", "c", "none", "2/4"]
    assert [len(c.calls) for c in contenders.values()] == [4, 4, 4]
    seen.clear()
    list(rounds(contenders, PROMPTS[:1], max_new_tokens=4, repeats=2, report=report))
    assert seen == ["none", "b", "c", "b", "c", "none", "1/1"]


def test_a_run_goes_on_where_it_was_stopped_in_the_order_it_would_have_had() -> None:
    def order(start: int) -> list[str]:
        seen: list[str] = []
        report: Callable[[int, int, str], None] = lambda done, total, what: seen.append(what)  # noqa: E731
        list(rounds({"none": Known(1.0), "b": Known(1.0)}, PROMPTS, max_new_tokens=2, start=start, report=report))
        return seen

    assert order(0)[-3:] == order(3)


def test_warm_up_is_apart_and_short() -> None:
    good, bad = Known(1.0), Known(1.0, breaks=0)
    seconds, errors = warm_up({"good": good, "bad": bad}, [1, 2], max_new_tokens=100)
    assert good.calls == [([1, 2], 16)]
    assert set(seconds) == {"good", "bad"}
    assert errors == {"bad": "RuntimeError: it broke badly"}


def test_an_error_is_an_error_and_never_a_timed_answer() -> None:
    bad = Known(9.0, breaks=2)
    found = records({"none": Known(1.0), "bad": bad}, max_new_tokens=4)
    assert found[1] == {"name": "bad", "error": "RuntimeError: it broke badly"}
    assert found[0]["prompts"] == 4
    assert len(bad.calls) == 3, "it is not asked again"
    assert list(rounds({"bad": Known(1.0, breaks=0)}, PROMPTS, max_new_tokens=4))[-1].index == 0, "nobody is left"


def test_an_answer_without_tokens_is_an_error() -> None:
    class Mute(Known):
        def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
            return Run([], 1.0)

    (record,) = records({"none": Mute(1.0)})
    assert "returned no tokens" in record["error"]


def test_without_a_baseline_there_are_no_ratios() -> None:
    found = records({"none": Known(1.0, breaks=0), "other": Known(1.0)})
    assert "error" in found[0]
    assert "speedup_quartiles" not in found[1]
    assert "equal_outputs" not in found[1]


def test_other_tokens_are_counted_and_the_common_prefix_measured() -> None:
    def answers(*ids: list[int]) -> list[list[Answer]]:
        return [[Answer(one, 1.0)] for one in ids]

    found = [
        ContenderAnswers("none", answers([1, 2, 3], [1, 2, 3], [5, 6], [9])),
        ContenderAnswers("other", answers([1, 2, 3], [1, 2, 4], [5, 6, 7], [8])),
    ]
    other = summarise(found, PROMPTS)[1]
    assert (other["equal_outputs"], other["common_prefix_median"]) == (1, 2)
    apart = summarise(found, PROMPTS, comparable=lambda name: name == "none")
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
    answer = Answer([1, 2, 3, 4, 5], 0.5, 0.1, 1, stats)
    assert Answer.from_dict(answer.to_dict()) == answer
    assert (stats.accepted_tokens, stats.acceptance_rate, stats.draft_nodes_per_step) == (3, 3 / 8, 4.0)
    twice = Stats.merged([stats, stats])
    assert (twice.tokens, twice.steps, twice.accepted[3]) == (10, 4, 2)
    assert twice.acceptance_by_depth() == stats.acceptance_by_depth() == [1.0, 1.0, 1.0]
    assert Answer.from_dict(Answer([1], 0.5).to_dict()).stats is None


def test_tokens_that_come_with_the_first_are_not_counted_after_it() -> None:
    assert Answer([1, 2, 3, 4], 1.0, 0.4, first_tokens=2).token_seconds == pytest.approx(0.3)
    assert Answer([1, 2], 1.0, 0.4, first_tokens=2).token_seconds is None


def test_gather_keeps_the_first_error() -> None:
    one = Round(0, {"a": [Answer([1], 1.0)]}, {"b": "late"})
    a, b, c = gather(["a", "b", "c"], [one], {"c": "early"})
    assert (a.error, b.error, c.error) == (None, "late", "early")
    assert len(a.answers) == 1
