"""Reports: the environment of a run, and its result as tables, as a Markdown page and as a sheet."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.quality import columns_of, quality_table
from anabranch.bench.summary import CALL_KEYS, CALL_TITLES, call_cells
from anabranch.native.library import library
from anabranch.support.processor import processor_flags, processor_name
from anabranch.support.table import Table, decimal, quartiles_cell

__all__ = [
    "DETAILS",
    "SCHEMA",
    "environment",
    "heading",
    "markdown",
    "rows_table",
    "sheet",
    "short_table",
    "tables_of",
    "verdict",
]

SCHEMA = 2  # docs/metrics.md, "The result file"
PACKAGE = Path(__file__).parents[1]
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")  # that results name


def _kernels(device: torch.device) -> str:
    """The instruction set of the native kernels; "torch" without them."""
    kernels = library() if device.type == "cpu" else None
    return "torch" if kernels is None else kernels.instruction_set


def _commit(package: Path = PACKAGE) -> str:
    """The commit of the checkout that has ``package`` as src/anabranch, with "-dirty" if its src has changed since.

    Not the commit of another repository that an installed package may be inside of.
    """
    lines = _git(package, "rev-parse", "--show-toplevel", "--short", "HEAD")
    if lines is None or len(lines) != 2 or Path(lines[0], "src", "anabranch").resolve() != package.resolve():
        return "unknown"
    changed = _git(Path(lines[0]), "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", "src")
    return lines[1] if changed == [] else f"{lines[1]}-dirty"


def _git(folder: Path, *words: str) -> list[str] | None:
    """The output of git in lines; None if it fails or is not installed."""
    command = ["git", "-C", str(folder), *words]
    try:
        out = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=5, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return out.stdout.splitlines() if out.returncode == 0 else None


def _version() -> str:
    try:
        return version("anabranch")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unreleased"


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": processor_name(),
        "instructions": [flag for flag in INSTRUCTIONS if flag in processor_flags()],
        "kernels": _kernels(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "anabranch": _version(),
        "commit": _commit(),
    }


def _digits(machine: Mapping[str, Any]) -> int:
    """Decimals of the matrix rate, which is very low on processors without bf16 instructions."""
    return 2 if min(machine["matrix_tflop_s"]) >= 0.1 else 4


def _median(values: Sequence[float] | None, digits: int = 1) -> str:
    return "-" if values is None else decimal(values[1], digits)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _physics(machine: Mapping[str, Any]) -> str:
    """The machine's rates before the run and, if it was complete, after it."""
    rates = [
        f"{quartiles_cell(part['read_gb_s'], 1)} GB/s and computes "
        f"{quartiles_cell(part['matrix_tflop_s'], _digits(part))} TFLOP/s"
        for part in (machine, machine.get("after"))
        if part is not None
    ]
    return f"The machine reads {' before the run, and after it '.join(rates)} in {machine['dtype']}"


def heading(result: Mapping[str, Any]) -> list[str]:
    """One sentence per line: the run, the machine, and its bandwidth and matrix rate."""
    run, where, machine = result["run"], result["environment"], result["machine"]
    of = f"{result['prompts_done']} of {run['prompts']}" if not result["complete"] else f"{run['prompts']}"
    sampling = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}, seed {run['seed']}"
    instructions = f" ({', '.join(where['instructions'])})" if where["instructions"] else ""
    lines = [
        f"{run['suite']}: {of} prompts, {run['max_new_tokens']} new tokens, {sampling}, {run['dtype']}, batch 1, "
        f"{run['repeats']} repeat{'s' if run['repeats'] > 1 else ''}; model {run['model']}.",
        f"{where['date']}, {where['device']}, {where['processor']}{instructions}, {where['threads']} threads"
        f"{', kernels in ' + where['kernels'] if 'kernels' in where else ''}; "
        f"anabranch {where['anabranch']} (commit {where['commit']}), torch {where['torch']}, "
        f"transformers {where['transformers']}, Python {where['python']}.",
        f"{_physics(machine)}. A token reads {machine['weight_mb']:.1f} MB of weights: plain decoding "
        f"cannot take less than {machine['floor_ms']:.2f} ms per token.",
    ]
    if clause := run.get("near_ties"):
        lines.append(f"{clause[0].upper()}{clause[1:]}.")
    if run["temperature"] > 0:
        lines.append(
            "Sampled: with the same seed all our methods use the same random numbers at each position, so their tokens "
            "should equal plain decoding's. Peers use their own: same distribution, but tokens are not comparable."
        )
    if memory := result["memory_mb"]:
        peaks = ", ".join(f"{value:.0f} MB {kind}" for kind, value in memory.items())
        lines.append(f"Our contenders share one process; its peak memory while decoding: {peaks}.")
    for record in result["contenders"]:
        if "every" in record:
            lines.append(
                f"{record['name']} decoded {record['prompts']} of the prompts only; its ratios are over the same ones."
            )
    became = [(r["name"], r["drafter"]) for r in result["contenders"] if r.get("drafter", r["spec"]) != r["spec"]]
    if became:
        lines.append("; ".join(f"{name} is {drafter} here" for name, drafter in became) + ".")
    for record in result["contenders"]:
        if info := record.get("info"):
            facts = ", ".join(
                f"{key.removesuffix('_bytes').replace('_', ' ')} {_fact(key, value)}" for key, value in info.items()
            )
            lines.append(f"{record['name']}, in its own process: {facts}.")
    return lines


def _fact(key: str, value: Any) -> str:
    """A fact reported by a peer, as text."""
    if key.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 1e6:.0f} MB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


# column titles and cells of the two main tables
Column = tuple[str, Callable[[Mapping[str, Any]], str]]
SPEED: tuple[Column, ...] = (
    ("tokens/s", lambda r: decimal(r["tokens_per_second"], 1)),
    ("mean over\nprompts", lambda r: decimal(r["tokens_per_second_mean"], 1)),
    ("speedup\n(quartiles)", lambda r: quartiles_cell(r.get("speedup_quartiles"))),
    ("first\nms", lambda r: _median(r["first_token_ms_quartiles"])),
    ("ms/token", lambda r: _median(r["token_ms_quartiles"])),
    ("floor/\ntoken", lambda r: _share(r.get("floor_share"))),
    ("equal", lambda r: f"{r['equal_outputs']}/{r['prompts']}" if "equal_outputs" in r else "-"),
    ("common\nprefix", lambda r: decimal(r.get("common_prefix_median"), 0)),
)
STEPS: tuple[Column, ...] = (
    ("mean acceptance\nlength", lambda r: decimal(r["mean_acceptance_length"])),
    *((title, lambda r, place=place: call_cells(r)[place]) for place, title in enumerate(CALL_TITLES)),
    ("draft\nnodes", lambda r: decimal(r["draft_nodes_per_step"], 1)),
    ("acceptance\nby depth", lambda r: " ".join(f"{share:.2f}" for share in r["acceptance_by_depth"][:4]) or "-"),
    ("ms/step", lambda r: _median(r["step_ms_quartiles"])),
    ("floor/\nstep", lambda r: _share(r.get("floor_share_step"))),
    *(
        (f"{part}\nms", lambda r, part=part: decimal(r["step_ms_by_part"].get(part), 1))
        for part in ("draft", "forward", "verify", "commit", "prepare")
    ),
)
ROWS = (
    *("contender", "rows", "tokens/s\n(range)", "ratio to\nplain", "TTFT ms\nmedian / p95", "ITL ms\nmedian / p95"),
    *("mean acceptance\nlength", *CALL_TITLES, "draft\nnodes", "equal"),
)
# captions of the tables with more columns than ``verdict.short_table``
DETAILS = ("Speed, compared with our plain decoding of the same prompts", "Statistics of speculation")


def tables_of(result: Mapping[str, Any]) -> list[Table]:
    """The tables of a result, without empty ones."""
    good = [record for record in result["contenders"] if "error" not in record]
    ours = [record for record in good if "steps" in record]
    tables = [quality_table(result)] if "application" in result["run"] else []
    for caption, columns, records in ((DETAILS[0], SPEED, good), (DETAILS[1], STEPS, ours)):
        rows = [[record["name"], *(cell(record) for _, cell in columns)] for record in records]
        tables.append(Table(["contender", *(title for title, _ in columns)], rows, caption))
    if ours and (peers := [r for r in good if r.get("kind") == "peer" and "every" not in r]):
        rates = [peer["tokens_per_second"] for peer in peers]
        rows = [
            [r["name"], *(decimal(r["tokens_per_second"] / rate) for rate in rates)] for r in ours if "every" not in r
        ]
        tables.append(Table(["contender", *(peer["name"] for peer in peers)], rows, "Tokens/s relative to peers"))
    if good and len(tasks := list(good[0]["by_task"])) > 1:
        rows = [[record["name"], *(_of_task(record["by_task"].get(task)) for task in tasks)] for record in good]
        titles = ["contender", *(task.replace("_", "\n") for task in tasks)]
        tables.append(Table(titles, rows, "By task: median speedup / mean acceptance length"))
    failed = [[record["name"], record["error"]] for record in result["contenders"] if "error" in record]
    tables.append(Table(["contender", "error"], failed, "Not measured", left=2))
    return [table for table in tables if table.rows]


def _of_task(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    return f"{_median(record.get('speedup_quartiles'), 2)} / {decimal(record.get('mean_acceptance_length'))}"


def rows_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The table of a result by number of rows (``summary.summarise_rows``)."""
    rows = []
    for record in records:
        if "error" in record:
            rows.append([record["name"], "-", f"failed: {record['error']}", *["-"] * (len(ROWS) - 3)])
            continue
        low, middle, high = record["tokens_per_second"]
        rows.append(
            [
                *(record["name"], record["rows"], f"{middle:.1f} ({low:.1f}-{high:.1f})"),
                quartiles_cell(record.get("ratio")),
                _both(record["first_token_ms"]),
                _both(record["token_ms"]),
                decimal(record.get("mean_acceptance_length")),
                *call_cells(record),
                decimal(record.get("draft_nodes_per_step"), 1),
                f"{record['equal_outputs']}/{record['prompts']}" if "equal_outputs" in record else "-",
            ]
        )
    return Table(ROWS, rows)


def _both(milliseconds: Mapping[str, float] | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds['median']:.1f} / {milliseconds['p95']:.1f}"


def markdown(result: Mapping[str, Any], figures: Sequence[str] = ()) -> str:
    """The result as a Markdown page: the command, the machine, the tables, and ``figures`` in the same folder."""
    run = result["run"]
    lines = [f"# {run['suite']}, {result['prompts_done']} prompts, {run['max_new_tokens']} new tokens, {run['dtype']}"]
    lines += ["", f"`{run['command']}`", ""]
    if not result["complete"]:
        lines += [f"**Stopped after {result['prompts_done']} of {run['prompts']} prompts.**", ""]
    for sentence in heading(result):
        lines += [sentence, ""]
    for table in tables_of(result):
        lines += [f"{table.caption}:", "", *table.markdown()]
    for name in figures:
        lines += [f"![{name}]({name})", ""]
    lines.append("Every number is defined in docs/metrics.md of anabranch.")
    return "\n".join(lines) + "\n"


SHEET = (
    "tokens_per_second",
    "tokens_per_second_mean",
    "speedup_total",
    "mean_acceptance_length",
    *CALL_KEYS,
    "acceptance_rate",
    "draft_nodes_per_step",
    "floor_share",
    "floor_share_step",
    "equal_outputs",
    "common_prefix_median",
)
ENDS = ("mean", "low", "high")
SPREADS = ("speedup", "tokens_per_second", "first_token_ms", "token_ms", "step_ms")


def sheet(result: Mapping[str, Any]) -> Table:
    """The result as a sheet: for each contender one line for all prompts (task "all") and one per task."""
    spreads = [f"{name}_{end}" for name in SPREADS for end in ("q1", "median", "q3")]
    application = result["run"].get("application")
    scores = [(key, end) for key in (columns_of(application["metrics"]) if application else ()) for end in ENDS]
    extras = ["equal_texts", "extra_parameters"] if application else []
    rows = []
    for record in result["contenders"]:
        for task, part in [("all", record), *record.get("by_task", {}).items()]:
            numbers = [part.get(name, "") for name in SHEET]
            for name in SPREADS:
                numbers += part.get(f"{name}_quartiles") or [""] * 3
            numbers += [part.get("quality", {}).get(key, {}).get(end, "") for key, end in scores]
            numbers += [part.get(name, "") for name in extras]
            named = (record["name"], record["spec"], task, part.get("prompts", ""))
            rows.append([*named, *numbers, record.get("error", "")])
    scored = [f"{key}_{end}" for key, end in scores]
    return Table(["contender", "spec", "task", "prompts", *SHEET, *spreads, *scored, *extras, "error"], rows)


TITLES = ("contender", "tokens/s", "speedup\n(quartiles)", "mean accept-\nance length", "equal")
SHORTEST = 20  # columns for a contender's name, which is broken at its punctuation if it is longer
PLAIN = "plain decoding"

Record = Mapping[str, Any]


def verdict(contenders: Sequence[Record]) -> str:
    """One sentence: which contender is the fastest, and by how much."""
    good = [record for record in contenders if "error" not in record]
    if not good:
        return "no contender could be measured"
    ranked = sorted(good, key=lambda record: -float(record["tokens_per_second"]))
    best, drafting = ranked[0], [record for record in ranked if "speedup_quartiles" in record and not _plain(record)]
    if not _plain(best):
        return f"{best['name']} is the fastest: {_rate(best)}{_against(best)}{_differing(best)}"
    fastest = f"{_described(best)} is the fastest: {_rate(best)}"
    if not drafting:
        return fastest if len(good) > 1 else f"{_described(best)} reaches {_rate(best)}"
    return f"{fastest}; the best drafter is {drafting[0]['name']} with {_rate(drafting[0])}{_against(drafting[0])}"


def short_table(contenders: Sequence[Record], width: int | None = None) -> Table:
    """Five columns for every contender that was measured; long names are broken to fit a terminal of ``width``."""
    rows = [_short_row(record) for record in contenders if "error" not in record]
    if width is not None:
        columns = zip(TITLES, *rows, strict=True)
        widths = [1 + max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
        room = max(SHORTEST, width - sum(widths[1:]))
        rows = [[_broken(name, room), *cells] for name, *cells in rows]
    return Table(TITLES, rows)


def _short_row(record: Record) -> list[str]:
    return [
        str(record["name"]),
        f"{record['tokens_per_second']:.1f}",
        quartiles_cell(record.get("speedup_quartiles")),
        decimal(record.get("mean_acceptance_length")),
        f"{record['equal_outputs']}/{record['prompts']}" if "equal_outputs" in record else "-",
    ]


def _broken(name: str, room: int) -> str:
    """A name in lines of at most ``room`` characters, broken after a plus sign, a comma or a colon where possible."""
    lines, rest = [], name
    while len(rest) > room:
        at = max(rest.rfind(sign, 0, room) for sign in "+,:") + 1
        at = at or room
        lines.append(rest[:at])
        rest = rest[at:]
    return "\n".join([*lines, rest])


def _plain(record: Record) -> bool:
    return bool(record.get("spec", record["name"]) == "none")


def _described(record: Record) -> str:
    weights = record.get("weights", "none")
    return PLAIN if weights == "none" else f"{PLAIN} with {weights} weights"


def _rate(record: Record) -> str:
    return f"{record['tokens_per_second']:.1f} tokens/s"


def _against(record: Record) -> str:
    spread = record.get("speedup_quartiles")
    if spread is None:
        return ""
    low, middle, high = spread
    return f", {middle:.2f} times {_described(record)} (quartiles {low:.2f} to {high:.2f})"


def _differing(record: Record) -> str:
    if "equal_outputs" not in record or record["equal_outputs"] == record["prompts"]:
        return ""
    differing = record["prompts"] - record["equal_outputs"]
    return f"; {differing} of {record['prompts']} outputs differ from it ('anabranch certify' tells why)"
