"""Write docs/benchmarks.md and its charts from the files in benchmarks/.

python research/benchmarks_page.py            # write
python research/benchmarks_page.py --check    # write nothing; exit 1 and name every file that would change
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from anabranch.bench.figures import leading
from bar_chart import Bar, bar_chart
from benchmark_tables import KINDS, at_a_time, kind_of, machine_line, tables_of
from generated import ROOT, write_or_check

BENCHMARKS = ROOT / "benchmarks"
PAGE, PICTURES = "docs/benchmarks.md", "docs/pictures"
# all of these processors report the same name, so machines are told apart by the names of the result files
MACHINES = {
    "epyc-avx512-2cores": "AMD EPYC Zen 5, AVX-512",
    "epyc-zen4-2cores": "AMD EPYC Zen 4, AVX-512",
    "epyc-avx2-2cores": "AMD EPYC, AVX2",
}
SUITES = {"spec_bench": "Spec-Bench"}
Result = Mapping[str, Any]
Record = Mapping[str, Any]


def read_results() -> dict[str, Result]:
    """Every result file by its name without the suffix."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(BENCHMARKS.glob("*.json"))}


def machine_of(stem: str) -> str | None:
    """The machine that the name of a comparison ends in, as in spec-bench-MACHINE-DATE; None for other names."""
    found = re.fullmatch(r"spec-bench-(.*?)-\d{4}-\d\d-\d\d", stem)
    return found[1] if found and found[1] in MACHINES else None


def _rate(record: Record) -> float:
    return float(record["tokens_per_second"])


def _suite(run: Mapping[str, Any]) -> str:
    return SUITES.get(run["suite"], str(run["suite"]))


def _wrapped(text: str) -> list[str]:
    return [*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""]


def _date(result: Result) -> str:
    return str(result["environment"]["date"])


def _caption(machine: str, result: Result) -> str:
    run = result["run"]
    sampling = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}"
    return (
        f"{_suite(run)}, {result['prompts_done']} prompts, {run['max_new_tokens']} new tokens, {sampling}; "
        f"{MACHINES.get(machine, machine)}, {result['environment']['threads']} cores, {_date(result)}"
    )


def page_chart(stem: str, result: Result) -> str:
    """At most ten contenders of a comparison."""
    records = [record for record in result["contenders"] if "error" not in record]
    shown = leading(records)
    title = f"Tokens per second, {at_a_time(result['run'])}"
    if len(shown) < len(records):
        title += f" ({len(shown)} of {len(records)} contenders: the fastest of each kind)"
    bars = [Bar(record["name"], _rate(record), record["kind"] == "ours") for record in shown]
    return bar_chart(title, _caption(machine_of(stem) or stem, result), bars)


def page(results: Mapping[str, Result]) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        *_wrapped(
            "Every result file of the repository as tables. `python research/benchmarks_page.py` writes this page from "
            "`benchmarks/`; do not edit it. [Metrics](metrics.md) defines every number. Speedups compare with our own "
            "plain decoding on the same prompt, in the same run, with the same weights. The default model is "
            "SmolLM2-135M-Instruct. All runs are on CPUs; nothing has been measured on a GPU."
        ),
    ]
    for title, _, _ in KINDS:
        chosen = {stem: result for stem, result in results.items() if kind_of(result) == title}
        if chosen:
            lines += [f"## {title}", ""]
        for stem, result in chosen.items():
            lines += [f"### {stem}", ""]
            command = result.get("command") or result.get("run", {}).get("command")
            for paragraph in (machine_line(result), f"`{command}`" if command else ""):
                lines += [paragraph, ""] if paragraph else []
            if "prompts_done" in result:
                lines += [f"![Tokens per second](pictures/{stem}.svg)", ""]
            lines += tables_of(result)
    return "\n".join(lines).rstrip() + "\n"


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    results = read_results()
    files = {PAGE: page(results)}
    files |= {f"{PICTURES}/{stem}.svg": page_chart(stem, r) for stem, r in results.items() if "prompts_done" in r}
    return files


def main() -> None:
    write_or_check("benchmarks_page.py", (__doc__ or "").splitlines()[0], outputs)


if __name__ == "__main__":
    main()
