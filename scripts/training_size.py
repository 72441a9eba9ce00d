"""Estimate the hours of a training by model size, from the rates measured with the default model.

In both stages the arithmetic per token grows with the number of parameters P, so a rate r measured with P0 parameters
becomes r * P0 / P. With T completion tokens:

    hours = T / (generation rate * P0 / P) / 3600  +  epochs * T / (training rate * P0 / P) / 3600

That holds for streams through the same share of the layers (12 of 30), prompts about as long as the completions, and
hardware limited by arithmetic, as a CPU with 32 rows is. Prints a Markdown table.

    python scripts/training_size.py
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

DEFAULT = 134.5e6  # parameters of the default model
LOG = Path(__file__).resolve().parents[1] / "benchmarks" / "training-default-adapter-2026-11-21.jsonl"
ANSWER_RATE = (
    300.0  # completion tokens/s, 64 rows, bf16, 2 cores with AVX-512: docs/log.md, "Generation of training answers"
)
SIZES = (135e6, 360e6, 1.1e9, 1.7e9, 3e9, 7e9)
TOKENS = (100e3, 700e3)
TOKENS_PER_ANSWER = 104  # of the last training of the default adapter: 669,629 tokens in 6,435 answers


def training_rate() -> float:
    """Positions/s of the last run in the log: the recipe default-adapter, twelve layers, one epoch, 2 cores."""
    lines = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    start = max(n for n in range(1, len(lines)) if lines[n]["step"] <= lines[n - 1]["step"])
    return statistics.median(float(line["positions_per_second"]) for line in lines[start:])


def hours(tokens: float, rate: float, parameters: float) -> float:
    """Hours for ``tokens`` at a ``rate`` measured with the default model."""
    return tokens / (rate * DEFAULT / parameters) / 3600


def shown(value: float) -> str:
    """Two significant digits: these are estimates."""
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--answer-rate", type=float, default=ANSWER_RATE, help="completion tokens/s with the default model"
    )
    parser.add_argument(
        "--training-rate", type=float, help="positions/s with the default model (default: from the log)"
    )
    parser.add_argument("--epochs", type=float, default=1.0)
    args = parser.parse_args()
    rate = args.training_rate or training_rate()
    print(
        f"Completions at {args.answer_rate:.0f} tokens/s, training at {rate:.0f} positions/s, "
        f"{args.epochs:g} epoch(s).\n"
    )
    heads = [f"{tokens / 1e3:,.0f}k tokens: {what}" for tokens in TOKENS for what in ("completions", "training")]
    print("| parameters | " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * len(heads))
    for size in SIZES:
        cells = [
            f"{shown(hours(amount, speed, size))} h"
            for tokens in TOKENS
            for amount, speed in ((tokens, args.answer_rate), (args.epochs * tokens, rate))
        ]
        print(f"| {size / 1e6:,.0f}M | " + " | ".join(cells) + " |")
    prompts = ", ".join(f"{tokens / 1e3:,.0f}k tokens: {tokens / TOKENS_PER_ANSWER:,.0f}" for tokens in TOKENS)
    print(f"\nPrompts at {TOKENS_PER_ANSWER} tokens per completion: {prompts}.")


if __name__ == "__main__":
    main()
