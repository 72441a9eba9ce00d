"""The tables of docs/benchmarks/: one function for each kind of result file, found by the keys of the file.

A function takes the parsed file and returns lines of Markdown. A file of no known kind is listed with its command.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabranch.bench.shape_tables import pass_costs
from anabranch.bench.summary import CALL_TITLES, call_cells
from anabranch.support.table import Table
from generated import ROOT

__all__ = [
    "added",
    "at_a_time",
    "certificates",
    "command_line",
    "comparison",
    "kind_of",
    "machine_line",
    "table",
    "tables_of",
    "throughput",
]

Result = Mapping[str, Any]


def table(titles: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """The lines of a Markdown table, without columns that have no value in any row."""
    empty = {n for n in range(len(titles)) if rows and all(n < len(row) and row[n] == "-" for row in rows)}
    return Table(
        [title for n, title in enumerate(titles) if n not in empty],
        [[cell for n, cell in enumerate(row) if n not in empty] for row in rows],
        left=left,
    ).markdown()


def machine_line(result: Result) -> str:
    """Date, processor, kernels and versions, as far as the file says; empty where it says nothing."""
    where = result.get("environment")
    if where is None:
        told = ", ".join(str(result[key]) for key in ("date", "machine") if key in result)
        return told and f"{told}."
    parts = [where["date"], f"{where['processor']} ({', '.join(where['instructions'])})", f"{where['threads']} threads"]
    if where.get("device", "cpu") != "cpu":
        parts.insert(1, where["device"])
    if "kernels" in where:
        parts.append(f"{where['kernels']} kernels")
    parts += [f"PyTorch {where['torch']}", f"transformers {where['transformers']}", f"commit {where['commit']}"]
    return f"{', '.join(parts)}."


def command_line(result: Result) -> str:
    """The command of a result in backticks; empty where it says none.

    A script that has moved stands where it is now, if it still takes the options. Other commands of scripts that are
    gone are followed by the commit that has them.
    """
    command = str(result.get("command") or result.get("run", {}).get("command") or "")
    named = re.search(r"\bscripts/(\w+\.py)", command)
    if named is None or (ROOT / named[0]).is_file():
        return command and f"`{command}`"
    moved = ROOT / "research" / named[1]
    code = moved.read_text(encoding="utf-8") if moved.is_file() else ""
    if code and all(f'"{option}"' in code for option in re.findall(r"(?<= )--[a-z-]+", command)):
        return f"`{command.replace(named[0], f'research/{named[1]}')}`"
    return f"`{command}` (a script of commit {result['environment']['commit']})"


def _rates(machine: Result) -> str:
    tflops = machine["matrix_tflop_s"][1]
    return f"{machine['read_gb_s'][1]:.1f} GB/s and {tflops:.{2 if tflops >= 0.1 else 4}f} TFLOP/s"


def _memory_line(machine: Result) -> str:
    """The machine's rates before and after the run, and the floor that its memory sets."""
    after = f", and {_rates(machine['after'])} after it" if "after" in machine else ""
    return (
        f"The machine reached {_rates(machine)} before the run{after}: a token of plain decoding takes at least "
        f"{machine['floor_ms']:.1f} ms, the time to read the weights once."
    )


def at_a_time(run: Result) -> str:
    """The number of prompts that a comparison decodes together, in words."""
    rows = run.get("rows", 1)
    return "one prompt at a time" if rows == 1 else f"{rows} prompts at a time"


def added(record: Result) -> list[str]:
    """Name the additions that drafted beside a contender's own method, by the sources of its tokens.

    Until these were drafters and settings of their own, ``streams`` had them by default.
    """
    sources = record.get("sources") or {}
    copy = any(source.startswith(("lead ", "quantized ")) for source in sources)
    return (["a 4-bit copy of the target"] if copy else []) + (["copying from the text"] if "copy" in sources else [])


def _additions(result: Result) -> list[str]:
    """A sentence for contenders whose names do not say what was added to them."""
    found: dict[str, list[str]] = {}
    for record in result["contenders"]:
        named = str(record.get("drafter", record["spec"]))
        if "quantized_draft" not in named and "copy=yes" not in named and (more := added(record)):
            found.setdefault(" and ".join(more), []).append(f"`{record['name']}`")
    drafters = [f"{', '.join(names)} with {more}" for more, names in found.items()]
    if not drafters:
        return []
    return [
        "In this run drafters did not name all that drafted. By the sources of their tokens there drafted "
        f"{'; '.join(drafters)} ([now](methods/streams.md#what-is-ours) `+quantized_draft` and `copy=yes`).",
        "",
    ]


def comparison(result: Result) -> list[str]:
    """Drafters and peers on the same prompts (``anabranch bench``)."""
    run = result["run"]
    sampling = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}, seed {run['seed']}"
    lines = [
        f"{result['prompts_done']} prompts of {run['suite']}, {run['max_new_tokens']} new tokens, {sampling}, "
        f"{run['dtype']}, {at_a_time(run)}. {_memory_line(result['machine'])}",
        "",
    ]
    chosen = [
        f"`{r['name']}` was `{r['drafter']}`"
        for r in result["contenders"]
        if r["name"].startswith("auto") and r.get("drafter", r["spec"]) != r["spec"]
    ]
    if chosen:
        lines += [f"In this run {', '.join(chosen)}, chosen when the model was loaded.", ""]
    lines += _additions(result)
    return [*lines, *table(CONTENDER, [_contender(record) for record in result["contenders"]])]


CONTENDER = (
    "contender",
    "tokens/s",
    "speedup (quartiles)",
    "mean acceptance length",
    *CALL_TITLES,
    "ms/token",
    "equal",
)


def _contender(record: Result) -> list[str]:
    """One line of a comparison; the file has more columns, and the same by task."""
    if "error" in record:
        return [f"`{record['name']}`", record["error"]]
    low, middle, high = record["speedup_quartiles"]
    length, latency = record.get("mean_acceptance_length"), record["token_ms_quartiles"]
    fewer = f" ({record['prompts']} prompts)" if "every" in record else ""
    return [
        f"`{record['name']}`{fewer}",
        f"{record['tokens_per_second']:.1f}",
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
        "-" if length is None else f"{length:.2f}",
        *call_cells(record),
        "-" if latency is None else f"{latency[1]:.1f}",
        f"{record['equal_outputs']}",
    ]


def _long_context(result: Result) -> list[str]:
    rows = [
        (f"{r['context']:,}", f"`{r['method']}`", r["prefill_s"], r["step_ms"], r["tokens_per_step"])
        for r in result["rows"]
    ]
    return table(("context (tokens)", "drafter", "prefill s", "ms/step", "mean acceptance length"), rows, left=2)


def _exactness(result: Result) -> list[str]:
    by_count: dict[str, list[str]] = {}
    for name, counts in result["methods"].items():
        by_count.setdefault(f"{counts['equal']} of {counts['prompts']}", []).append(f"`{name}`")
    return [
        f"{result['new_tokens']} new tokens, {result['dtype']}; prompts whose tokens are those of plain decoding.",
        "",
        *table(("equal", "methods"), [(equal, ", ".join(names)) for equal, names in by_count.items()], left=2),
    ]


def certificates(results: Mapping[str, Result]) -> list[str]:
    """Prompts whose tokens are those of plain decoding (``anabranch certify``), all results in one table."""
    rows = [
        (
            *(f"`{stem}`", r["certified"]["model"], f"`{r['drafter']}`", r["certified"]["suite"]),
            *(r["certified"]["max_new_tokens"], len(r["prompts"])),
            *(r["counts"][verdict] for verdict in ("equal", "tie", "BUG")),
        )
        for stem, r in results.items()
    ]
    titles = ("result", "model", "drafter", "suite", "new tokens", "prompts", "equal", "ties", "bugs")
    return table(titles, rows, left=4)


def _memory(result: Result) -> list[str]:
    rows = [(f"peak: {what}", f"{mb:.0f}") for what, mb in result["peak_mb"].items()]
    return table(("what", "MB"), [*rows, ("weights", result["weights_mb"]), ("cache", result["cache_mb"])])


def _growth(result: Result) -> list[str]:
    first, *_, last = held = result["held_mb"]
    rows = [
        ("model loaded", result["loaded_mb"]),
        (f"after `{first[0]}`", first[1]),
        (f"after {len(held) - 1} more drafters and prompts, the last a {last[0]}", last[1]),
    ]
    return table(("when", "resident MB"), rows)


def _segments(result: Result) -> list[str]:
    """Segment attention against the naive layout: peak memory and speed (``research/segment_memory.py``)."""
    by_shape: dict[tuple[int, int], dict[str, Result]] = {}
    for row in result["rows"]:
        by_shape.setdefault((row["gamma"], row["length"]), {})[row["layout"]] = row
    rows = []
    for (gamma, length), found in by_shape.items():
        if gamma not in (4, 8) or length < 1024:  # the file has all
            continue
        cells = [
            "not run" if "not_run" in found[layout] else f"{found[layout][field]:,.0f}"
            for field in ("peak_mb", "positions_per_second")
            for layout in ("segments", "naive")
        ]
        rows.append((gamma, f"{length:,}", *cells))
    titles = ("gamma", "tokens", "MB, segments", "MB, naive", "positions/s, segments", "positions/s, naive")
    return table(titles, rows, left=0)


def _predicted(result: Result) -> list[str]:
    cells = [result[f"{what}_mean_acceptance_length"] for what in ("predicted", "decoded")]
    return table(
        ("prompts", "nodes", "predicted mean acceptance length", "decoded mean acceptance length"),
        [(result["prompts"], result["nodes"], *(f"{cell:.3f}" for cell in cells))],
        left=0,
    )


def _decoded(result: Result) -> list[str]:
    """Tokens a pass that drafters decoded on prompts of several kinds (``research/acceptance_by_kind.py``)."""
    decoded = result["decoded"]
    rows = [
        [
            kind,
            *(f"{run['tokens_per_pass'][kind]:.2f}" for run in decoded),
            min(run["equal_to_plain"][kind] for run in decoded),
        ]
        for kind in decoded[0]["tokens_per_pass"]
    ]
    titles = [
        "kind of prompt",
        *(f"`{run['drafter']}`, mean acceptance length" for run in decoded),
        "texts equal to plain decoding",
    ]
    return [
        f"{result['prompts_of_a_kind']} prompts of each kind, {result['new_tokens']} new tokens, one at a time.",
        "",
        *table(titles, rows),
    ]


def _own_evaluation(result: Result) -> list[str]:
    rows = [
        (name, *(f"{result[side][key]:.3f}" for side in ("spec_bench", "ours")))
        for name, key in (
            ("mean acceptance length", "mean_acceptance_length"),
            ("tokens/s", "tokens_per_second"),
            ("tokens/s, plain decoding", "plain_tokens_per_second"),
            ("speedup", "speedup"),
        )
    ]
    return [f"`{result['method']}`, {result['questions']} questions.", "", *table(("", "Spec-Bench", "ours"), rows)]


def _passes_by_nodes(result: Result) -> list[str]:
    """Passes by their number of nodes (``anabranch bench shape``)."""
    costs = pass_costs(result["timed"])
    return [f"{costs.caption[0].upper()}{costs.caption[1:]}.", "", *costs.markdown()]


def _shape(result: Result) -> list[str]:
    """The same as it was written for one model with random weights."""
    rows = [
        (r["kind"], f"{r['context']:,}", r["batch"], f"{r['ms'][1]:.1f} ({r['ms'][0]:.1f}-{r['ms'][2]:.1f})")
        for r in result["steps"]
    ]
    return [
        f"{result['model']}, {result['dtype']}, random weights. {_memory_line(result['machine'])}",
        "",
        *table(("step", "context", "rows", "ms (quartiles)"), rows),
    ]


def _tables(result: Result) -> list[str]:
    """Building tables of a large text and drafting from them."""
    rows = [
        (
            f"`{name}`",
            *(f"{kind[key]:,}" for key in ("build_seconds", "peak_anonymous_mb", "peak_resident_mb")),
            f"{kind['bytes_on_disk'] / 1e6:.0f}",
            *(kind[key] for key in ("open_ms", "draft_ms_median", "draft_ms_99th_percentile", "nodes_mean")),
        )
        for name, kind in result["tables"].items()
    ]
    titles = ("tables", "build s", "peak MB", "peak MB with mapped pages", "MB on disk", "open ms")
    return [
        f"{result['tokens']:,} tokens of a synthetic text, `--memory {result['memory_option_mb']}`; drafts of up to "
        "16 nodes.",
        "",
        *table((*titles, "draft ms, median", "99th percentile", "nodes"), rows),
    ]


def _training_rates(result: Result) -> list[str]:
    """Training rates and memory of the methods (``research/training_rates.py``)."""
    completions = result["completions"]
    rows = [("completions", "", "", completions["tokens_per_second"], completions["peak_mb"])] if completions else []
    rows += [
        (f"`{name}`", f"{kind['parameters']:,}", kind["arithmetic"], kind["positions_per_second"], kind["peak_mb"])
        for name, kind in result["methods"].items()
    ]
    whose = f"`{result['model']}`. " if result.get("model", "default") != "default" else ""
    asked = f"Completions of {completions['rows']} prompts at a time; trainings" if completions else "Trainings"
    return [
        f"{whose}{asked} with {result['batch_tokens']} padded tokens per step. Rates by processor time are what all "
        "threads would reach if nothing else ran.",
        "",
        *table(
            ("stage", "parameters", "arithmetic", "per second, by processor time", "by the clock", "peak MB"),
            [
                (*names, f"{rate['by_processor_time']:.0f}", f"{rate['by_clock']:.0f}", f"{peak:,}")
                for *names, rate, peak in rows
            ],
        ),
    ]


def _listed(result: Result) -> list[str]:
    return []


def throughput(results: Mapping[str, Result]) -> list[str]:
    """Rates by the number of concurrent prompts (``anabranch bench load``), all results in one table."""
    counts = sorted({record["rows"] for result in results.values() for record in result["results"]})
    rows = []
    for stem, result in results.items():
        cells: dict[str, dict[int, str]] = {}
        for record in result["results"]:
            rate = f"{record['tokens_per_second'][1]:.0f}"
            ratio = (
                f" ({record['ratio'][1]:.2f})" if record.get("ratio") and record["name"].split("@")[0] != "none" else ""
            )
            cells.setdefault(record["name"], {})[record["rows"]] = rate + ratio
        for number, (name, rates) in enumerate(cells.items()):
            rows.append((f"`{stem}`" if number == 0 else "", f"`{name}`", *(rates.get(count, "") for count in counts)))
    return [
        "Tokens/s by the number of prompts decoded at a time, medians over repeats; in brackets over plain decoding's. "
        "The result files have ranges, the time to the first token, latencies and counts of passes.",
        "",
        *table(("result", "drafter", *map(str, counts)), rows, left=2),
    ]


def _served(result: Result) -> list[str]:
    """Loads of servers (``research/serve_load.py``): throughput by load, then every latency."""
    loads: dict[str, dict[str, list[Result]]] = {}
    for record in result["loads"]:
        share = record.get("share_of_capacity")
        name = f"{share} of capacity" if share else str(record["clients"])
        loads.setdefault(name, {}).setdefault(record["arm"], []).append(record)
    arms = list(dict.fromkeys(record["arm"] for record in result["loads"]))
    rates = {load: {arm: _served_rate(records) for arm, records in by_arm.items()} for load, by_arm in loads.items()}
    rows, latencies = [], []
    for load, by_arm in loads.items():
        plain = rates[load].get("none")
        closed = "capacity" not in load  # at random times, each arm is sent requests at a rate of its own
        cells = [
            "-"
            if arm not in by_arm
            else f"{rate:.0f} ({rate / plain:.2f})"
            if plain and closed and arm != "none"
            else f"{rate:.0f}"
            for arm, rate in ((arm, rates[load].get(arm, 0.0)) for arm in arms)
        ]
        rows.append((load, next(iter(by_arm.values()))[0]["requests"], *cells))
        for arm in by_arm:
            for record in by_arm[arm]:
                times = [
                    " / ".join(f"{value:,.0f}" for value in record[key].values()) for key in ("ttft_ms", "tpot_ms")
                ]
                latencies.append((load, f"`{arm}`", *times, record.get("failed", {}).get("count", 0)))
    named = ", ".join(f"`{arm}` is `{options}`" for arm, options in result["arms"].items())
    return [
        f"Tokens/s by the number of clients, prompts of {result['suite']}, at most {result['new_tokens']} new tokens, "
        f"means over rounds; in brackets over `none`. {named}.",
        "",
        *table(("clients", "requests", *(f"`{arm}`" for arm in arms)), rows),
        "Milliseconds to the first text, and from text to text by token: the median, the 95th and the 99th percentile "
        "of each round, and the requests that failed.",
        "",
        *table(("clients", "server", "to the first text", "by token", "failed"), latencies, left=2),
    ]


def _served_rate(records: Sequence[Result]) -> float:
    """The mean tokens/s of the rounds of a load."""
    return float(statistics.mean(record["tokens_per_second"] for record in records))


def _methods(result: Result) -> list[str]:
    """Trained and model-free methods (``research/compare_methods.py``), which have a page of their own."""
    names = ", ".join(f"`{method['name']}`" for method in result["compared"])
    return [f"{names}. The newest such result is on the page [Comparison of methods](comparison.md).", ""]


def _study(result: Result) -> list[str]:
    """A study of the papers (``research/study.py``), which have a page of their own."""
    return [
        f"`{result['study']}`. The newest result of each study is on the page [The papers' studies](reproduction.md).",
        "",
    ]


# what a kind is called, the keys that only its files have, and its tables; the page has them in this order
KINDS: tuple[tuple[str, tuple[str, ...], Callable[[Result], list[str]]], ...] = (
    ("Drafters and other engines", ("contenders", "prompts_done"), comparison),
    ("Several prompts at a time", ("contenders", "results"), _listed),
    ("Servers under load", ("loads", "arms", "new_tokens"), _served),
    ("Methods", ("compared",), _methods),
    ("Long context", ("passages", "rows"), _long_context),
    ("Exactness", ("methods", "what"), _exactness),
    ("Certificates", ("certified", "counts"), _listed),
    ("Predicted acceptance", ("predicted_over_decoded",), _predicted),
    ("Acceptance by kind of prompt", ("decoded", "prompts_of_a_kind"), _decoded),
    ("Spec-Bench's own evaluation", ("spec_bench", "ours"), _own_evaluation),
    ("Passes by number of nodes", ("timed", "command"), _passes_by_nodes),
    ("Step times in the shape of larger models", ("steps", "parameters", "left_out"), _shape),
    ("Memory", ("peak_mb",), _memory),
    ("Memory with many drafters", ("held_mb",), _growth),
    ("Segment attention", ("segment", "rows"), _segments),
    ("Training rates", ("methods", "completions", "batch_tokens"), _training_rates),
    ("Tables of a large text", ("tables", "tokens"), _tables),
    ("Studies of the papers", ("study",), _study),
    ("Other results", (), _listed),
)


def kind_of(result: Result) -> str:
    """The title of the first kind all of whose keys the file has."""
    if "application" in result.get("run", {}):
        return "Applications"
    return next(title for title, keys, _ in KINDS if all(key in result for key in keys))


def tables_of(result: Result) -> list[str]:
    """The lines of the file's tables."""
    return next(show for title, _, show in KINDS if title == kind_of(result))(result)
