"""The contenders of a figure."""

from __future__ import annotations

from typing import Any

from anabranch.bench.figures import MOST, leading


def record(name: str, rate: float, kind: str = "ours", weights: str = "none") -> dict[str, Any]:
    return {"name": name, "tokens_per_second": rate, "kind": kind, "weights": weights}


def test_the_first_and_in_turn_the_fastest_of_each_kind() -> None:
    records = [
        record("none", 1),
        *(record(f"bf16-{n}", 10 + n) for n in range(6)),
        *(record(f"int4-{n}", 30 + n, weights="int4") for n in range(6)),
        *(record(f"peer-{n}", 2 + n, kind="peer") for n in range(2)),
    ]
    shown = [r["name"] for r in leading(records)]
    assert len(shown) == MOST
    expected = ["none", "bf16-3", "bf16-4", "bf16-5", "int4-2", "int4-3", "int4-4", "int4-5", "peer-0", "peer-1"]
    assert shown == expected


def test_few_contenders_are_all_shown() -> None:
    records = [record(str(n), n) for n in range(MOST)]
    assert leading(records) is records
