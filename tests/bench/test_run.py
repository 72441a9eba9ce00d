"""The harness itself, on contenders whose speed and output are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anabranch.bench.contenders import Run
from anabranch.bench.report import SCHEMA, markdown
from anabranch.bench.run import measure, summarise
from anabranch.bench.suites import Prompt

PROMPTS = [(Prompt(str(i), "ab"[i % 2], "?"), [1, 2, i]) for i in range(4)]


class Known:
    """Emits the same tokens at a known rate; breaks on call ``breaks``."""

    def __init__(self, name: str, rate: float, *, breaks: int | None = None, token: int = 7) -> None:
        self.name, self.rate, self.breaks, self.token = name, rate, breaks, token
        self.calls: list[tuple[list[int], int]] = []

    def decode(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Run:
        self.calls.append((list(prompt_ids), max_new_tokens))
        if self.breaks is not None and len(self.calls) > self.breaks:
            raise RuntimeError("it broke")
        tokens = [self.token] * max_new_tokens
        return Run(tokens, len(tokens) / self.rate)


def test_ratios_are_to_plain_decoding_on_the_same_prompt() -> None:
    slow, fast = Known("none", 10.0), Known("fast", 25.0)
    records = summarise(measure([slow, fast], PROMPTS, max_new_tokens=20, repeats=2), PROMPTS)
    assert records[0]["speedup_quartiles"] == [1.0, 1.0, 1.0]
    assert records[1]["speedup_quartiles"] == pytest.approx([2.5, 2.5, 2.5])
    assert records[1]["tokens_per_second"] == pytest.approx(25.0)
    assert records[1]["equal_outputs"] == 4
    assert records[1]["by_task"]["a"] == {"prompts": 2, "tokens_per_second": 25.0, "speedup": 2.5}


def test_contenders_alternate_and_the_order_rotates() -> None:
    seen: list[str] = []
    contenders = [Known("none", 1.0), Known("b", 1.0), Known("c", 1.0)]
    measure(contenders, PROMPTS, max_new_tokens=4, report=lambda done, total, name: seen.append(name.split()[0]))
    assert seen[:6] == ["none", "b", "c", "b", "c", "none"]
    # one warm-up call each, then every prompt once
    assert [len(c.calls) for c in contenders] == [5, 5, 5]


def test_an_error_is_an_error_and_never_a_timed_answer() -> None:
    found = measure([Known("none", 1.0), Known("bad", 9.0, breaks=2)], PROMPTS, max_new_tokens=4)
    records = summarise(found, PROMPTS)
    assert records[1] == {"name": "bad", "error": "RuntimeError: it broke"}
    page = markdown(
        {
            "schema": SCHEMA,
            "run": {"suite": "own", "prompts": 4, "max_new_tokens": 4, "dtype": "float32", "command": "bench"},
            "environment": dict.fromkeys(("date", "processor", "threads", "torch", "transformers", "commit"), "")
            | {"instructions": []},
            "contenders": records,
        }
    )
    assert "it broke" in page
    assert "| none |" in page


def test_other_tokens_are_counted() -> None:
    records = summarise(measure([Known("none", 1.0), Known("other", 1.0, token=8)], PROMPTS, max_new_tokens=3), PROMPTS)
    assert records[1]["equal_outputs"] == 0
