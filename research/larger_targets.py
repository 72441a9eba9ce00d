"""The part of docs/comparison.md on targets of 0.5 and 1.5 billion parameters: cost of a pass, and speedup by task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark_tables import table
from generated import newest, results
from intervals import cell, speedup_interval, task_cell

__all__ = ["lines"]

Result = Mapping[str, Any]
PASSES, RUNS, LEARNED = "passes-by-nodes-*.json", "qwen2.5-coder-*-spec-bench-*.json", "study-learning_larger-*.json"
PLAIN = "none"
TARGET = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"  # whose costs the paragraph on other methods states
OURS = ("auto", "streams", "prompt_lookup")  # streams and methods that learn nothing


def lines() -> list[str]:
    """All lines: the table of costs, the sentence that follows from it, and speedups by task."""
    passes, learned = newest(PASSES), newest(LEARNED)
    contenders = list(_contenders(_newest_first(results(RUNS))))
    if passes is None:
        return _by_task(contenders)
    carried = [] if learned is None else _carried(passes[1], learned[1])
    return [*_costs(passes[1]), *_verdict(passes[1], contenders), *carried, *_by_task(contenders)]


def _newest_first(runs: Mapping[str, Result]) -> list[tuple[str, Result]]:
    return sorted(runs.items(), key=lambda each: (each[1]["environment"]["date"], each[0]), reverse=True)


def _contenders(runs: Sequence[tuple[str, Result]]) -> Iterator[tuple[str, Result, Result, Result]]:
    """The newest record of each of our contenders by target, with plain decoding's and the run."""
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


def _costs(passes: Result) -> list[str]:
    shares = _shares(passes)
    widths = list(next(iter(shares.values())))
    rows = [[_short(model), *(f"{share[width]:.2f}" for width in widths)] for model, share in shares.items()]
    return [
        "A pass over plain decoding's pass, by its number of nodes. It is the mean acceptance length from which drafts "
        "of that size gain, if drafting took no time; drafting adds its own share of a plain step:",
        "",
        *table(("target", *(f"{width} nodes" if width > 1 else "1 node" for width in widths)), rows),
    ]


def _verdict(passes: Result, contenders: Sequence[tuple[str, Result, Result, Result]]) -> list[str]:
    """Name the learned methods other than streams that gain on the largest target, from its records."""
    share = _shares(passes)[TARGET]
    free = max(width for width, ratio in share.items() if ratio <= 1.1)
    wide = min(width for width in share if width > free)
    text = (
        f"So on the 1.5B drafts of {free} nodes are free, {wide} need a mean acceptance length of {share[wide]:.2f}, "
        f"and 16 need {share[16]:.2f}: methods gain there by small drafts that are cheap to make."
    )
    for _, run, record, plain in contenders:
        if run["run"]["model"] != TARGET or record["name"].split(":")[0] in OURS:
            continue
        speed = speedup_interval(record, plain, range(record["prompts"]))
        parts, whole = record["step_ms_by_part"], sum(plain["step_ms_by_part"].values())
        drafting = (parts["draft"] + max(0.0, parts["prepare"] - plain["step_ms_by_part"]["prepare"])) / whole
        text += (
            f" `{record['name']}` has {record['mean_acceptance_length']:.2f} tokens a pass, drafts for "
            f"{drafting:.2f} plain steps, verifies for {parts['forward'] / whole:.2f}, and decodes at {cell(speed)} "
            f"times plain decoding."
        )
    return [text, ""]


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
        "predicted mean acceptance lengths there; in brackets, times plain decoding on the 1.5B at most, by the cost "
        "of its passes alone, if the length were the same there:",
        "",
        *table(titles, rows),
        f"With the best size of draft that is {', '.join(gain) or 'a gain for none'}; the time of drafting comes off.",
        "",
    ]


def _by_task(contenders: Sequence[tuple[str, Result, Result, Result]]) -> list[str]:
    """Tokens/s over plain decoding's by task, with intervals."""
    tasks: list[str] = []
    rows = []
    for stem, run, record, plain in sorted(contenders, key=lambda each: (each[1]["run"]["model"], each[2]["name"])):
        by_prompt = [prompt["task"] for prompt in run["prompts"]]
        tasks = tasks or list(dict.fromkeys(by_prompt))
        cells = [task_cell(record, plain, by_prompt, task) for task in (None, *tasks)]
        length = f"{record['mean_acceptance_length']:.2f}"
        rows.append([_short(run["run"]["model"]), f"`{record['name']}`", length, *cells, f"`{stem}`"])
    if not rows:
        return []
    titles = ["target", "method", "mean acceptance length", "all", *(task.replace("_", " ") for task in tasks)]
    return [
        "Tokens per second over plain decoding's on Spec-Bench, one prompt at a time; in brackets the middle 95 % over "
        "resampled prompts (bootstrap), which are few by task:",
        "",
        *table([*titles, "result"], rows, left=2),
    ]


def _short(model: str) -> str:
    return model.removesuffix(".gguf").removesuffix("-instruct-q4_k_m")
