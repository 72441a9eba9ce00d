"""Write docs/benchmarks.md and its charts from the files in benchmarks/, and the results part of README.md.

    python research/benchmarks_page.py            # write
    python research/benchmarks_page.py --check    # write nothing; exit 1 and name every file that would change

README.md gets a table with the newest comparison of each machine, one chart, and the sentences that split the gain
into kernels and speculation, between the two comments ``START`` and ``END``.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from anabranch.bench.figures import leading
from bar_chart import Bar, bar_chart
from benchmark_tables import KINDS, added, at_a_time, kind_of, machine_line, table, tables_of
from generated import ROOT, write_or_check

BENCHMARKS = ROOT / "benchmarks"
PAGE, README, PICTURES = "docs/benchmarks.md", "README.md", "docs/pictures"
START, END = "<!-- results: research/benchmarks_page.py -->", "<!-- end of results -->"
# all of these processors report the same name, so machines are told apart by the names of the result files
MACHINES = {
    "epyc-avx512-2cores": "AMD EPYC Zen 5, AVX-512",
    "epyc-zen4-2cores": "AMD EPYC Zen 4, AVX-512",
    "epyc-avx2-2cores": "AMD EPYC, AVX2",
}
NAMES = {"openvino": "OpenVINO", "vllm": "vLLM"}
SUITES = {"spec_bench": "Spec-Bench"}
FORMATS = {"none": "bf16", "int8": "int8", "int4": "int4"}
COPY = "a 4-bit copy of the target"  # as ``added`` calls it
REFERENCE = "transformers"  # the peer that kernels are compared with
SIGNS = "¹²³⁴⁵⁶⁷⁸⁹"
COPIED, TEXT = "*", "†"
BARS = 8  # in README's chart
Result = Mapping[str, Any]
Record = Mapping[str, Any]


def read_results() -> dict[str, Result]:
    """Every result file by its name without the suffix."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(BENCHMARKS.glob("*.json"))}


def machine_of(stem: str) -> str | None:
    """The machine that the name of a comparison ends in, as in spec-bench-MACHINE-DATE; None for other names."""
    found = re.fullmatch(r"spec-bench-(.*?)-\d{4}-\d\d-\d\d", stem)
    return found[1] if found and found[1] in MACHINES else None


def newest_comparisons(results: Mapping[str, Result]) -> dict[str, Result]:
    """The newest comparison of each machine, in the order of ``MACHINES``."""
    single = {stem: r for stem, r in results.items() if r.get("run", {}).get("rows", 1) == 1}
    found = {machine: r for stem, r in single.items() if (machine := machine_of(stem))}  # sorted: the newest is last
    return {machine: found[machine] for machine in MACHINES if machine in found}


def ours(result: Result, weights: str) -> tuple[Record, Record]:
    """(plain decoding, ``auto``) with these weights; the fastest fixed drafter where ``auto`` did not take part."""
    records = [r for r in result["contenders"] if "error" not in r and r["kind"] == "ours" and r["weights"] == weights]
    plain = next(r for r in records if r["spec"] == "none")
    auto = next((r for r in records if r["spec"] == "auto"), None)
    return plain, auto or max(records, key=_rate)


def streams_alone(result: Result, weights: str) -> Record | None:
    """Streams with 8 nodes and no copy of the target in front of them; None if they were not measured so."""
    records = [r for r in result["contenders"] if "error" not in r and r["kind"] == "ours" and r["weights"] == weights]
    specs = ("streams:tree=8", "streams:tree=8,lead=0", "streams:nodes=8", "streams:nodes=8,lead=0")
    return next((r for r in records if r["spec"] in specs and COPY not in added(r)), None)


def peers(result: Result) -> list[Record]:
    """The peers that were measured, the fastest first."""
    found = [r for r in result["contenders"] if "error" not in r and r["kind"] == "peer"]
    return sorted(found, key=_rate, reverse=True)


def _rate(record: Record) -> float:
    return float(record["tokens_per_second"])


def _suite(run: Mapping[str, Any]) -> str:
    return SUITES.get(run["suite"], str(run["suite"]))


def _readable(record: Record) -> str:
    """A peer's name with the format of its weights."""
    weights = record.get("info", {}).get("weights", "")
    engine, *method = str(record["name"]).split(":", maxsplit=1)[0].split("-")
    name = NAMES.get(engine, engine) + (" with prompt lookup" if method == ["lookup"] else "")
    short = {"bfloat16": "bf16", "float32": "fp32"}.get(weights, weights.rpartition(".")[2])
    return f"{name}, {short}" if short else name


def results_table(comparisons: Mapping[str, Result]) -> list[str]:
    """README's table: two lines a machine, and a note for every number that is not of today's ``auto``."""
    rows: list[tuple[str, ...]] = []
    fixed: list[str] = []  # what stands in for auto where it did not take part
    copied = False  # whether a copy of the target drafted in ``auto``
    earlier: list[str] = []  # what auto was when it still chose one drafter at load
    for machine, result in comparisons.items():
        best = peers(result)[0]
        for weights in ("none", "int4"):
            plain, auto = ours(result, weights)
            low, middle, high = auto["speedup_quartiles"]
            alone = streams_alone(result, weights)
            copied |= COPY in added(auto)
            mark = "" if auto["spec"] == "auto" and "auto" in auto["drafter"] else SIGNS[len(fixed) + len(earlier)]
            if mark:
                (fixed if auto["spec"] != "auto" else earlier).append(f"{mark}\u00a0`{auto['drafter']}`")
            rows.append(
                (
                    f"{MACHINES[machine]}, {result['environment']['threads']} cores",
                    FORMATS[weights],
                    f"{_rate(plain):.0f}",
                    f"{_rate(auto):.0f}{mark}",
                    f"{middle:.2f} ({low:.2f}-{high:.2f})",
                    f"{auto['mean_acceptance_length']:.2f}{COPIED if COPY in added(auto) else ''}",
                    "-" if alone is None else _alone(alone),
                    f"{_rate(best):.0f} ({_readable(best)})",
                )
            )
    titles = (
        "hardware",
        "weights",
        "plain",
        "`auto`",
        "speedup",
        "tokens per target pass",
        "`streams`, 8 nodes",
        "best other engine",
    )
    sentences = [
        f"Fastest fixed drafter of a run without `auto`: {', '.join(fixed)}." if fixed else "",
        f"Chosen at load by an earlier `auto`: {', '.join(earlier)}." if earlier else "",
    ]
    if copied:
        of_text = f" ({TEXT}\u00a0also copied from the text)" if any(TEXT in row[6] for row in rows) else ""
        sentences.append(
            f"{COPIED}\u00a0A 4-bit copy of the model drafts before the streams; its passes do not count here. "
            f"`streams`: without it, tokens/s and tokens per target pass{of_text}."
        )
    notes = " ".join(filter(None, sentences))
    return [*table(titles, rows, left=2), *(_wrapped(notes) if notes else [])]


def _alone(record: Record) -> str:
    mark = TEXT if any("text" in what for what in added(record)) else ""
    return f"{_rate(record):.0f}, {record['mean_acceptance_length']:.2f}{mark}"


def _wrapped(text: str) -> list[str]:
    return [*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""]


def charted(comparisons: Mapping[str, Result]) -> str:
    """The machine of README's chart: the newest comparison in which ``auto`` took part."""
    return max(comparisons, key=lambda m: (ours(comparisons[m], "none")[1]["spec"] == "auto", _date(comparisons[m])))


def _date(result: Result) -> str:
    return str(result["environment"]["date"])


def readme_chart(machine: str, result: Result) -> str:
    """Plain decoding and ``auto`` in bf16, ``auto`` in int4, the fastest peers, and the reference."""
    others = peers(result)
    chosen = [record for record in others if record["name"] != REFERENCE][: BARS - 4]
    chosen += [record for record in others if record["name"] == REFERENCE]
    (plain, auto), (_, small) = ours(result, "none"), ours(result, "int4")
    bars = [
        Bar("anabranch auto, int4", _rate(small), True),
        Bar("anabranch auto, bf16", _rate(auto), True),
        Bar("anabranch plain, bf16", _rate(plain), True),
    ]
    bars += [Bar(_readable(record), _rate(record), False) for record in chosen]
    return bar_chart(f"Tokens per second, {at_a_time(result['run'])}", _caption(machine, result), bars)


def _caption(machine: str, result: Result) -> str:
    run = result["run"]
    sampling = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}"
    return (
        f"{_suite(run)}, {result['prompts_done']} prompts, {run['max_new_tokens']} new tokens, {sampling}; "
        f"{MACHINES.get(machine, machine)}, {result['environment']['threads']} cores, {_date(result)}"
    )


def split_of_the_gain(machine: str, result: Result) -> list[str]:
    """Three sentences: what the kernels gain, what speculation gains, and both together."""
    (plain, auto), (_, small) = ours(result, "none"), ours(result, "int4")
    alone = streams_alone(result, "none")
    without = (
        ""
        if alone is None
        else (f" ({_rate(alone) / _rate(plain):.2f} and {alone['mean_acceptance_length']:.2f} without that copy)")
    )
    base = _rate(next(record for record in peers(result) if record["name"] == REFERENCE))
    token = plain["token_ms_quartiles"][1]
    floor = result["machine"]["floor_ms"]
    return _wrapped(
        f"On the machine of the chart, kernels make plain decoding {_rate(plain) / base:.1f} times as fast as "
        f"`transformers`: a token takes {token:.1f} ms, and reading the weights alone {floor:.1f} ms. Speculation "
        f"multiplies that by {_rate(auto) / _rate(plain):.2f}, at {auto['mean_acceptance_length']:.2f} tokens per "
        f"target pass{without}. Together that is {_rate(auto) / base:.1f} times `transformers`, and "
        f"{_rate(small) / base:.1f} times with int4 weights."
    )


def readme_part(comparisons: Mapping[str, Result]) -> str:
    """What stands between the two comments of README.md."""
    machine = charted(comparisons)
    run = comparisons[machine]["run"]
    lines = [
        START,
        *_wrapped(
            f"Tokens per second of the default model on {run['prompts']} prompts of {_suite(run)}, "
            f"greedy, {run['max_new_tokens']} new tokens, one prompt at a time. Speedup is the median over prompts "
            "(quartiles) against our own plain decoding with the same weights."
        ),
        *results_table(comparisons),
        f"![Tokens per second of anabranch and other engines]({PICTURES}/speed.svg)",
        "",
        *split_of_the_gain(machine, comparisons[machine]),
    ]
    return "\n".join([*lines, END])


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
