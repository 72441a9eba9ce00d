"""Decode the same prompts plainly and with several drafters, and keep what the studies of speed compare.

The measurements are those of ``anabranch.bench``: all drafters and plain decoding take turns, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabranch.bench.run import Encoded
from anabranch.bench.suites import SuitePrompt, load_suite
from anabranch.loading import Loaded
from anabranch.methods import parse_spec
from anabranch.options import Keywords
from anabranch.prompts import chat_ids
from case_parts import one_row
from studies.base import Setup, Table, spread

__all__ = ["PLAIN", "RECORD", "alone", "by_name", "facts", "speed_table"]

PLAIN = "none"
RECORD = (
    "name",
    "spec",
    "mean_acceptance_length",
    "draft_calls_per_token",
    "mb_read_per_token",
    "draft_nodes_per_step",
    "tokens_per_second",
    "speedup_quartiles",
    "relative_step",
    "equal_outputs",
    "error",
)


def alone(
    setup: Setup,
    loaded: Loaded,
    specs: Mapping[str, str],
    *,
    prompts: Sequence[SuitePrompt] | None = None,
    sampling: Keywords | None = None,
    rejection: Collection[str] = (),
) -> list[dict[str, Any]]:
    """One record per drafter, plain first: mean acceptance length, nodes a pass, tokens/s and its ratio to plain.

    prompts  None: the suite's
    """
    target = loaded.target
    asked = setup.prompts if prompts is None else prompts
    encoded: list[Encoded] = list(zip(asked, setup.encoded(target, asked), strict=True))
    warm = chat_ids(target.tokenizer, load_suite("own", limit=1)[0].text, model=target.name)
    found = one_row(
        loaded,
        {name: parse_spec(spec) for name, spec in specs.items()},
        encoded,
        warm,
        max_new_tokens=setup.new,
        sampling=sampling,
        rejection=rejection,
        report=setup.report,
    )
    kept = [{key: record[key] for key in RECORD if key in record} for record in found]
    for record in kept:
        for path in filter(None, (setup.draft, setup.table)):
            record["spec"] = record["spec"].replace(path, Path(path).name)
    return kept


def facts(setup: Setup, loaded: Loaded, prompts: Sequence[SuitePrompt] | None = None) -> dict[str, Any]:
    """The number of prompts (None: the suite's) and the settings, and the adapters' hashes by method."""
    return {
        "prompts": len(setup.prompts if prompts is None else prompts),
        "new_tokens": setup.new,
        "dtype": str(loaded.target.decoder.dtype).removeprefix("torch."),
        "adapters": {each.method.name: each.record["sha256"] for each in loaded.adapters},
    }


def by_name(records: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The records of drafters that did not fail."""
    return {record["name"]: record for record in records if "error" not in record}


def speed_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Drafter, nodes a pass, mean acceptance length, cost of a step, tokens/s, ratio to plain decoding."""
    rows: list[list[object]] = []
    for record in records:
        if "error" in record:
            rows.append([record["name"], "-", "-", "-", "-", f"not measured: {record['error']}"])
            continue
        ratio = "1" if record["name"] == PLAIN else spread(record["speedup_quartiles"])
        nodes = f"{record['draft_nodes_per_step']:.1f}"
        rate = f"{record['tokens_per_second']:.1f}"
        length = f"{record['mean_acceptance_length']:.2f}"
        rows.append([record["name"], nodes, length, f"{record['relative_step']:.2f}", rate, ratio])
    return (
        "drafter",
        "drafted nodes a pass",
        "mean acceptance length",
        "a step over a plain one",
        "tokens/s",
        "times plain decoding (quartiles)",
    ), rows
