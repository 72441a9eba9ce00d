"""Estimates the hours of a training by model size, from the rates measured with the default model.

In both stages the arithmetic per token grows with the number of parameters P, so a rate r measured with P0 parameters
becomes r * P0 / P. With T completion tokens:

    hours = T / (completion rate * P0 / P) / 3600  +  epochs * T / (training rate * P0 / P) / 3600

That holds for drafters that grow with the target as the default model's do, prompts about as long as the completions,
and hardware limited by arithmetic, as a CPU with 32 rows is. Prints the rates of all methods, and the estimates of one,
as Markdown tables. The rates are the newest that research/training_rates.py wrote, by processor time.

    python research/training_size.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DEFAULT = 134.5e6  # parameters of the default model
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SIZES = (135e6, 360e6, 1.1e9, 1.7e9, 3e9, 7e9)
TOKENS = (100e3, 700e3)


def measured() -> dict[str, Any]:
    """The newest result of research/training_rates.py."""
    newest = max(BENCHMARKS.glob("training-rates-*.json"), key=lambda path: path.stem[-10:])
    found: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8"))
    return found


def hours(tokens: float, rate: float, parameters: float) -> float:
    """Hours for ``tokens`` at a ``rate`` measured with the default model."""
    return tokens / (rate * DEFAULT / parameters) / 3600


def shown(value: float) -> str:
    """Two significant digits: these are estimates."""
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def rates_table(result: dict[str, Any]) -> list[str]:
    """A row for the completions and for each method."""
    lines = ["| stage | parameters | per second | by the clock | peak MB |", "|---|---:|---:|---:|---:|"]
    stages = {"completions, 64 rows": ("", result["completions"], "tokens_per_second")}
    for name, kind in result["methods"].items():
        stages[f"`{name}`"] = (f"{kind['parameters']:,}", kind, "positions_per_second")
    for name, (parameters, kind, unit) in stages.items():
        rate = kind[unit]
        lines.append(
            f"| {name} | {parameters} | {rate['by_processor_time']:.0f} | {rate['by_clock']:.0f} | "
            f"{kind['peak_mb']:,} |"
        )
    return lines


def sizes_table(completions: float, training: float) -> list[str]:
    """Hours by model size and number of completion tokens."""
    heads = [f"{tokens / 1e3:,.0f}k tokens: {what}" for tokens in TOKENS for what in ("completions", "training")]
    lines = ["| parameters | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for size in SIZES:
        cells = [f"{shown(hours(amount, rate, size))} h" for amount in TOKENS for rate in (completions, training)]
        lines.append(f"| {size / 1e6:,.0f}M | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", default="streams", help="estimate for this method, NAME or NAME:RECIPE")
    parser.add_argument("--answer-rate", type=float, help="completion tokens/s with the default model")
    parser.add_argument("--training-rate", type=float, help="positions/s with the default model")
    parser.add_argument("--epochs", type=float, default=1.0)
    args = parser.parse_args()
    result = measured()
    completions = args.answer_rate or result["completions"]["tokens_per_second"]["by_processor_time"]
    training = args.training_rate or result["methods"][args.method]["positions_per_second"]["by_processor_time"]
    print("\n".join(rates_table(result)))
    rates = f"Completions at {completions:.0f} tokens/s, training at {training:.0f} positions/s"
    print(f"\n{rates}, {args.epochs:g} epoch(s).")
    print("\n" + "\n".join(sizes_table(completions, training / args.epochs)))


if __name__ == "__main__":
    main()
