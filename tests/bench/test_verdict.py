"""The first lines of a comparison: a sentence and five columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from anabranch.bench.report import short_table, verdict


def contender(name: str, rate: float, **facts: object) -> dict[str, object]:
    return {"name": name, "spec": name, "weights": "none", "tokens_per_second": rate, "prompts": 6} | facts


PLAIN = contender("none", 100.0, speedup_quartiles=[1.0, 1.0, 1.0], mean_acceptance_length=1.0, equal_outputs=6)
FAST = contender("auto", 131.5, speedup_quartiles=[1.1, 1.32, 1.57], mean_acceptance_length=3.831, equal_outputs=6)
LONG = "streams:tree=8,prune=4+prompt_lookup:tokens=6"
SLOW = contender(LONG, 97.0, speedup_quartiles=[0.9, 0.97, 1.0], mean_acceptance_length=2.0, equal_outputs=5)
PEER = contender("theirs", 150.0, speedup_quartiles=[1.4, 1.5, 1.6])


def test_the_verdict_is_one_sentence() -> None:
    assert verdict([PLAIN, FAST, SLOW]) == (
        "auto is the fastest: 131.5 tokens/s, 1.32 times plain decoding (quartiles 1.10 to 1.57)"
    )
    assert verdict([PLAIN, SLOW]) == (
        f"plain decoding is the fastest: 100.0 tokens/s; the best drafter is {LONG} with 97.0 tokens/s, 0.97 times "
        "plain decoding (quartiles 0.90 to 1.00)"
    )
    assert verdict([PLAIN, FAST, PEER]).startswith("theirs is the fastest: 150.0 tokens/s, 1.50 times plain decoding")
    assert verdict([PLAIN | {"tokens_per_second": 9.0}, SLOW]).endswith(
        "; 1 of 6 outputs differ from it ('anabranch certify' tells why)"
    )
    int8 = contender("auto@int8", 200.0, weights="int8", speedup_quartiles=[1.0, 1.2, 1.3])
    assert "1.20 times plain decoding with int8 weights" in verdict([PLAIN, int8])
    assert verdict([PLAIN]) == "plain decoding reaches 100.0 tokens/s"
    assert verdict([{"name": "auto", "error": "it broke"}]) == "no contender could be measured"


@pytest.mark.parametrize("width", [72, 80, 100])
def test_five_columns_fit_and_long_names_are_broken_at_their_punctuation(width: int) -> None:
    table = short_table([PLAIN, FAST, SLOW, PEER, {"name": "bad", "error": "it broke"}], width)
    console = Console(width=width, file=io.StringIO())
    console.print(table.terminal())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    assert len(table.titles) == 5
    assert short_table([FAST, PEER]).rows == [
        ["auto", "131.5", "1.32 (1.10-1.57)", "3.83", "6/6"],
        ["theirs", "150.0", "1.50 (1.40-1.60)", "-", "-"],
    ]
    whole = "".join(line[: len(LONG)].strip().split("  ")[0] for line in lines)
    assert LONG.split("+")[0] in whole
    assert not any("bad" in line for line in lines)
