"""Write docs/benchmarks.md, a page a question in docs/benchmarks/, and their charts, from the files in benchmarks/.

python research/benchmarks_page.py            # write
python research/benchmarks_page.py --check    # write nothing; exit 1 and name every file that would change
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from anabranch.bench.figures import leading
from bar_chart import Bar, bar_chart
from benchmark_tables import at_a_time, certificates, command_line, kind_of, machine_line, table, tables_of, throughput
from generated import PICTURES, Result, results, write_or_check
from targets import LLAMA, MACHINES, SUITES, TARGETS, Run, by_machine, machine, ours, over, peer

INDEX, PAGES = "docs/benchmarks.md", "docs/benchmarks"
ENGINES = "Drafters and other engines"
QUESTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # page, question, kinds of results
    ("engines", "How fast is it compared with other engines?", (ENGINES,)),
    ("load", "What is left of the gain with several prompts at a time?", ("Several prompts at a time",)),
    ("serving", "How do servers compare under load?", ("Servers under load",)),
    ("context", "What happens at long context?", ("Long context",)),
    ("exactness", "Are the tokens those of plain decoding?", ("Certificates", "Exactness")),
    (
        "acceptance",
        "How much is accepted, and is it predicted well?",
        ("Acceptance by kind of prompt", "Predicted acceptance", "Spec-Bench's own evaluation"),
    ),
    (
        "sizes",
        "How many nodes are verified for free, and what does a step cost in larger models?",
        ("Passes by number of nodes", "Step times in the shape of larger models"),
    ),
    ("memory", "How much memory does it take?", ("Memory", "Memory with many drafters", "Tables of a large text")),
    ("training", "What does training take?", ("Training rates", "Segment attention")),
)
LATEST = ("Training rates", "Long context")  # the newest of each model: older machines and versions add nothing
MERGED = {"Certificates": certificates, "Several prompts at a time": throughput}
Record = Mapping[str, Any]


def machine_of(stem: str) -> str | None:
    """The machine that the name of a comparison ends in, as in spec-bench-MACHINE-DATE; None for other names."""
    return next((machine for machine in MACHINES if re.search(rf"(^|-){machine}-\d{{4}}-\d\d-\d\d$", stem)), None)


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
    """At most ten contenders of a comparison, of those that decoded all prompts."""
    records = [record for record in result["contenders"] if "error" not in record and "every" not in record]
    shown = leading(records)
    title = f"Tokens per second, {at_a_time(result['run'])}"
    if len(shown) < len(records):
        title += f" ({len(shown)} of {len(records)} contenders: the fastest of each kind)"
    bars = [Bar(record["name"], _rate(record), record["kind"] == "ours") for record in shown]
    return bar_chart(title, _caption(machine_of(stem) or stem, result), bars)


def newest(every: Mapping[str, Result]) -> dict[str, Result]:
    """The results without those that were measured again, under a name that differs in its date alone."""
    latest = {re.sub(r"-\d{4}-\d\d-\d\d$", "", stem): stem for stem in sorted(every)}
    return {stem: every[stem] for stem in every if stem in latest.values()}


def page(question: str, kinds: tuple[str, ...], every: Mapping[str, Result]) -> str:
    """The page of one question."""
    lines = [f"# {question}", ""]
    if ENGINES in kinds:
        lines += [*targets_table(), *machines_table(every)]
        every = {stem: result for stem, result in every.items() if detailed(stem, result)}
    for kind in kinds:
        chosen = {stem: result for stem, result in every.items() if kind_of(result) == kind}
        if not chosen:
            continue
        if kind in LATEST:
            order = sorted(chosen.items(), key=lambda each: (_date(each[1]), each[0]))
            chosen = dict({str(result.get("model")): (stem, result) for stem, result in order}.values())
        if len(kinds) > 1:
            lines += [f"## {kind}", ""]
        if kind in MERGED:
            lines += MERGED[kind](chosen)
            continue
        for stem, result in chosen.items():
            lines += [f"{'#' * (2 + (len(kinds) > 1))} {stem}", ""]
            if facts := " ".join(filter(None, (machine_line(result), command_line(result)))):
                lines += [facts, ""]
            if charted(result):
                lines += [f"![Tokens per second](../pictures/{stem}.svg)", ""]
            lines += tables_of(result)
    return "\n".join(lines).rstrip() + "\n"


def targets_table() -> list[str]:
    """The newest comparison of each target with llama.cpp, by suite and machine."""
    rows = []
    for target in TARGETS:
        for suite in SUITES:
            for run in by_machine(target, suite):
                rows += [_target_row(target, run, weights) for weights in ("none", "int4") if has(run, weights)]
    titles = ("target", "weights", "machine", "suite", "prompts")
    titles += ("plain, tokens/s", "`auto`, tokens/s", "llama.cpp, tokens/s")
    titles += ("`auto` / plain", "`auto` / plain by prompt (quartiles)", "`auto` / plain, steps alone")
    titles += ("prompts' share of plain", "of `auto`", "`auto` / llama.cpp", "result")
    return [
        "## Three targets",
        "",
        *_wrapped(
            "The newest run of each target beside llama.cpp, greedy, one prompt at a time; ratios of tokens/s in total "
            "include the reading of prompts, which drafts do not shorten. The table therefore also gives the ratio for "
            "the decoding steps alone, and the share of the total time that goes to prompts. llama.cpp decodes the "
            "same file, in the faster of the builds that were measured."
        ),
        *table(titles, rows, left=4),
    ]


def by_processor(stem: str) -> bool:
    """Return whether a result is a column of the table by processor."""
    return machine_of(stem) is not None and stem == f"spec-bench-{machine_of(stem)}-{stem[-10:]}"


def machines_table(every: Mapping[str, Result]) -> list[str]:
    """The default model on Spec-Bench, one column a machine."""
    runs = {
        machine: r for stem, r in every.items() if (machine := machine_of(stem)) and stem.startswith("spec-bench-e")
    }
    cells: dict[str, dict[str, str]] = {}
    for machine, result in runs.items():
        for record in result["contenders"]:
            if "error" not in record:
                speed = f"{_rate(record):.0f} ({record['speedup_quartiles'][1]:.2f})"
                cells.setdefault(f"`{record['name']}`", {})[machine] = speed
    titles = [f"{MACHINES[machine]}, {_date(result)}" for machine, result in runs.items()]
    return [
        "## The default model by processor",
        "",
        *_wrapped(
            "Tokens/s on 60 prompts of Spec-Bench, 128 new tokens, greedy, two cores; in brackets the median ratio to "
            "plain decoding with the same weights, of other engines to plain bf16. `streams:tree=8` and `auto` in bf16 "
            "on AVX-512 drafted with a 4-bit copy of the target (now `+quantized_draft`); `lead=0` is without it."
        ),
        *table(("contender", *titles), [(name, *(row.get(m, "") for m in runs)) for name, row in cells.items()]),
    ]


def detailed(stem: str, result: Result) -> bool:
    """Return whether a comparison has a section: the newest of Qwen2.5-Coder by suite and machine, and sampled ones."""
    if by_processor(stem):
        return False
    newest_runs = (run for target in TARGETS for suite in SUITES for run in by_machine(target, suite))
    return result.get("run", {}).get("temperature", 0) > 0 or stem in {run.stem for run in newest_runs}


def _stepping(record: Record) -> float:
    """Milliseconds of decoding steps for each token, without the reading of prompts."""
    return sum(record["step_ms_by_part"].values()) * record["steps"] / record["tokens"]


def _target_row(target: str, run: Run, weights: str) -> list[str]:
    plain, auto, theirs = ours(run, "none", weights), ours(run, "auto", weights), peer(run, LLAMA)
    assert theirs is not None
    low, middle, high = auto["speedup_quartiles"]
    settings = run.result["run"]
    form = "int4" if weights == "int4" else "as stored" if settings["model"].endswith(".gguf") else settings["dtype"]
    return [
        *(target, form, machine(run), run.suite, str(run.prompts)),
        *(f"{_rate(record):.1f}" for record in (plain, auto, theirs)),
        f"{over(auto, plain):.2f}",
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
        f"{_stepping(plain) / _stepping(auto):.2f}",
        *(f"{1 - _stepping(record) * _rate(record) / 1e3:.0%}" for record in (plain, auto)),
        f"{over(auto, theirs):.2f}",
        f"[{run.stem}](#{'the-default-model-by-processor' if by_processor(run.stem) else run.stem.replace('.', '')})",
    ]


def has(run: Run, weights: str) -> bool:
    """Return whether a run has plain decoding and ``auto`` with these weights."""
    return {(r["spec"], r["weights"]) for r in run.records if r["kind"] == "ours"} >= {
        ("none", weights),
        ("auto", weights),
    }


def index(every: Mapping[str, Result]) -> str:
    """docs/benchmarks.md."""
    rows = []
    for name, question, kinds in QUESTIONS:
        stems = [stem for stem, result in every.items() if kind_of(result) in kinds]
        rows.append((f"[{question}](benchmarks/{name}.md)", ", ".join(f"`{stem}`" for stem in stems)))
    covered = {kind for _, _, kinds in QUESTIONS for kind in kinds}
    others = [f"`{stem}`" for stem, result in every.items() if kind_of(result) not in covered]
    lines = [
        "# Benchmarks",
        "",
        *_wrapped(
            "One page a question, with the newest results that answer it; older ones stay in `benchmarks/`. `python "
            "research/benchmarks_page.py` writes these pages; do not edit them. [Metrics](metrics.md) defines every "
            "number. Speedups compare with our own plain decoding on the same prompt, in the same run, with the "
            "same weights. The default model is SmolLM2-135M-Instruct. All runs but that [on a GPU](gpu.md) are on "
            "CPUs."
        ),
        *table(("question", "results"), rows, left=2),
        *_wrapped(
            "Other results are on the pages [comparison of methods](comparison.md), [applications](applications.md) "
            f"and [the papers' studies](reproduction.md), or quoted where they are used: {', '.join(others)}."
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def charted(result: Result) -> bool:
    """Return whether a result has a chart: a comparison with other engines."""
    return "prompts_done" in result and any(record["kind"] == "peer" for record in result["contenders"])


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    every = results("*.json")
    files = {INDEX: index(every)}
    files |= {f"{PAGES}/{name}.md": page(question, kinds, newest(every)) for name, question, kinds in QUESTIONS}
    return files | {
        f"{PICTURES}/{stem}.svg": page_chart(stem, r)
        for stem, r in newest(every).items()
        if charted(r) and detailed(stem, r)
    }


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
