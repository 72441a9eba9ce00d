"""The part of docs/comparison.md on targets of 0.5 and 1.5 billion parameters: cost of a pass, and speedup by task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark_tables import table
from comparison_tables import by_depth
from generated import newest, results
from intervals import cell, speedup_interval, task_cell

__all__ = ["TARGET", "contenders", "lines"]

Result = Mapping[str, Any]
Contender = tuple[str, Result, Result, Result]
SAMPLED = "sampled-qwen2.5-coder-*.json"
PASSES, RUNS, LEARNED = "passes-by-nodes-*.json", "qwen2.5-coder-*-spec-bench-*.json", "study-learning_larger-*.json"
PLAIN = "none"
TARGET = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"  # whose costs the paragraph on other methods states
GREEDY, AT_ONE = "greedy", "sampled at temperature 1 and verified by matching"
OURS = ("auto", "streams", "prompt_lookup")  # streams and methods that learn nothing


def lines() -> list[str]:
    """All lines: the table of costs, what follows from it, speedups by task, and acceptance by depth."""
    passes, learned, found = newest(PASSES), newest(LEARNED), contenders()
    tables = [*_by_task(found, GREEDY), *_by_task(contenders(SAMPLED), AT_ONE), *_by_depth(found)]
    if passes is None:
        return tables
    carried = [] if learned is None else _carried(passes[1], learned[1])
    return [*_costs(*passes), *_verdict(passes[1], found), *carried, *tables]


def contenders(runs: str = RUNS) -> list[Contender]:
    """The newest record of each of our contenders by target: (name of the result, result, record, plain decoding's)."""
    found = _contenders(_newest_first(results(runs)))
    return sorted(found, key=lambda each: (each[1]["run"]["model"], each[2]["name"]))


def _newest_first(runs: Mapping[str, Result]) -> list[tuple[str, Result]]:
    return sorted(runs.items(), key=lambda each: (each[1]["environment"]["date"], each[0]), reverse=True)


def _contenders(runs: Sequence[tuple[str, Result]]) -> Iterator[Contender]:
    seen = set()
    for stem, run in runs:
        ours = {name for name, _, kind, _ in run["run"]["contenders"] if kind == "ours"}
        records = {record["name"]: record for record in run["contenders"] if "error" not in record}
        for name, record in records.items():
            key = run["run"]["model"], name
            if name != PLAIN and name in ours and "every" not in record and key not in seen:
                seen.add(key)
                yield stem, run, record, records[PLAIN]


def _shares(passes: Result) -> dict[str, dict[int, float]]:
    """A pass over plain decoding's by model and number of nodes."""
    return {
        timed["model"]: {
            int(step["kind"].split()[1]): step["over_plain"][1]
            for step in timed["steps"]
            if step["kind"].startswith("verify") and step["context"] == timed["steps"][0]["context"]
        }
        for timed in passes["timed"]
        if timed["model"].endswith(".gguf")
    }


def _costs(stem: str, passes: Result) -> list[str]:
    shares = _shares(passes)
    widths = list(next(iter(shares.values())))
    rows = [[_short(model), *(f"{share[width]:.2f}" for width in widths)] for model, share in shares.items()]
    return [
        f"A pass over plain decoding's pass, by its number of nodes (`{stem}`). It is the mean "
        "acceptance length from which drafts of that size gain, if drafting took no time; drafting adds its own share "
        "of a plain step:",
        "",
        *table(("target", *(f"{width} nodes" if width > 1 else "1 node" for width in widths)), rows),
    ]


def _verdict(passes: Result, contenders: Sequence[Contender]) -> list[str]:
    """Say which learned methods other than streams were timed on the largest target, and what that shows."""
    share = _shares(passes)[TARGET]
    free = max(width for width, ratio in share.items() if ratio <= 1.1)
    wide = min(width for width in share if width > free)
    text = (
        f"So on the 1.5B the pass over {free} nodes is free, one over {wide} needs a mean acceptance length of "
        f"{share[wide]:.2f}, and one over 16 needs {share[16]:.2f}."
    )
    timed: list[str] = []
    faster: list[str] = []
    for _, run, record, plain in contenders:
        if run["run"]["model"] != TARGET or record["name"].split(":")[0] in OURS:
            continue
        speed = speedup_interval(record, plain, range(record["prompts"]))
        parts, whole = record["step_ms_by_part"], sum(plain["step_ms_by_part"].values())
        drafting = (parts["draft"] + max(0.0, parts["prepare"] - plain["step_ms_by_part"]["prepare"])) / whole
        timed.append(f"`{record['name']}`")
        if speed is not None and speed[1] > 1:
            faster.append(timed[-1])
        text += (
            f" `{record['name']}` has {record['mean_acceptance_length']:.2f} tokens a pass, drafts for "
            f"{drafting:.2f} plain steps, verifies for {parts['forward'] / whole:.2f}, and decodes at {cell(speed)} "
            f"times plain decoding."
        )
    shown = f"Besides streams, the learned methods that were timed on the 1.5B are: {', '.join(timed) or 'none'}. "
    if faster:
        shown += f"Those whose whole interval lies above 1 are {', '.join(faster)}."
    else:
        shown += (
            "So it is not shown that a learned method other than streams decodes faster than plain decoding there. "
            "Nor does the cost of passes show that none can."
        )
    return [text, "", shown, ""]


def _carried(passes: Result, learned: Result) -> list[str]:
    """The speedup that lengths on the 0.5B would bring on the largest target."""
    share = _shares(passes)[TARGET]
    rows, best = [], dict[str, float]()
    for name, curve in learned["adapters"].items():
        times = {nodes: length / share[int(nodes.split()[0])] for nodes, length in curve["by_nodes"].items()}
        best[name] = max(times.values())
        cells = (f"{length:.2f} ({times[nodes]:.2f})" for nodes, length in curve["by_nodes"].items())
        rows.append([f"`{name}`", *cells])
    titles = ("method", *next(iter(learned["adapters"].values()))["by_nodes"])
    gain = [f"{times:.2f} for `{name}`" for name, times in best.items() if times > 1]
    return [
        "[Methods trained for the 0.5B](reproduction.md#the-same-on-a-target-of-05-billion-parameters), with their "
        "predicted mean acceptance lengths there. In brackets, the length over the cost of a pass on the 1.5B: a "
        "bound, not a measurement. It supposes the length of the 0.5B and leaves out the time of drafting:",
        "",
        *table(titles, rows),
        f"With the best size of draft the bound is {', '.join(gain) or 'at most 1 for all'}.",
        "",
    ]


def _by_task(contenders: Sequence[Contender], which: str) -> list[str]:
    """Tokens/s over plain decoding's by task, with intervals."""
    tasks: list[str] = []
    rows = []
    for stem, run, record, plain in contenders:
        by_prompt = [prompt["task"] for prompt in run["prompts"]]
        tasks = tasks or list(dict.fromkeys(by_prompt))
        cells = [task_cell(record, plain, by_prompt, task) for task in (None, *tasks)]
        length, count = f"{record['mean_acceptance_length']:.2f}", len(by_prompt) // len(tasks)
        rows.append([_short(run["run"]["model"]), f"`{record['name']}`", length, count, *cells, f"`{stem}`"])
    if not rows:
        return []
    titles = ["target", "method", "mean acceptance length", "prompts of a task", "all"]
    titles += [task.replace("_", " ") for task in tasks]
    return [
        f"Tokens per second over plain decoding's on Spec-Bench, {which}, one prompt at a time; in brackets the middle "
        "95 % over resampled prompts (bootstrap):",
        "",
        *table([*titles, "result"], rows, left=2),
    ]


def _by_depth(contenders: Sequence[Contender]) -> list[str]:
    """Acceptance by depth."""
    records = [([_short(run["run"]["model"]), f"`{record['name']}`"], record) for _, run, record, _ in contenders]
    caption = "Acceptance by depth in the same runs, as a percentage of the steps with a draft:"
    return [caption, "", *by_depth(records, ("target", "method"))]


def _short(model: str) -> str:
    return model.removesuffix(".gguf").removesuffix("-instruct-q4_k_m")
