"""ACL appendix O: long contexts, from the results of ``research/long_context.py``."""

from __future__ import annotations

from studies.base import Chart, Line, Result, Study, Table

__all__ = ["STUDY", "ratios"]


def ratios(result: Result) -> dict[str, dict[int, float]]:
    """Tokens/s over plain decoding while decoding, by method and context: tokens a step / milliseconds a step."""
    plain = {row["context"]: row["step_ms"] for row in result["rows"] if row["method"] == "none"}
    found: dict[str, dict[int, float]] = {}
    for row in result["rows"]:
        if row["method"] != "none" and row["context"] in plain:
            ratio = row["tokens_per_step"] * plain[row["context"]] / row["step_ms"]
            found.setdefault(row["method"], {})[row["context"]] = ratio
    return found


def _ours(result: Result) -> str:
    """The fastest drafter at each context."""
    best: dict[int, tuple[float, str]] = {}
    for method, by_context in ratios(result).items():
        for context, ratio in by_context.items():
            best[context] = max(best.get(context, (0.0, "")), (ratio, method))
    return "fastest: " + ", ".join(f"{n:,} tokens {ratio:.2f}x (`{method}`)" for n, (ratio, method) in best.items())


def _table(result: Result) -> Table:
    found = ratios(result)
    rows: list[list[object]] = []
    for r in result["rows"]:
        if r["context"] in found.get(r["method"], {}):
            ratio, length = found[r["method"]][r["context"]], r["tokens_per_step"]
            rows.append(
                [f"`{r['method']}`", f"{r['context']:,}", f"{length:.2f}", f"{length / ratio:.1f}", f"{ratio:.2f}"]
            )
    return (
        "drafter",
        "context (tokens)",
        "mean acceptance length",
        "a step over a plain one",
        "times plain decoding, without the prompt",
    ), rows


def _chart(result: Result) -> Chart:
    lines = [Line(name, list(found), list(found.values())) for name, found in ratios(result).items()]
    return Chart("Long contexts", "tokens of the prompt", "times plain decoding", lines)


STUDY = Study(
    name="long_context",
    papers="ACL appendix O, figure 21",
    title="Long contexts",
    measures="Passages of novels, cut to each length and followed by a request to sum them up: mean acceptance length "
    "and the median time of a step, every passage by all drafters in turn.",
    paper="2.64 times plain decoding on LongBench's summarization task, gamma = 3 and k = 4",
    differs="the adapter that ships was trained further on 108 passages of other novels and 14 thousand tokens of the "
    "model's summaries of them (the commands are in research/long_context.py; held-out completions 3.07 tokens a pass "
    "before, 3.21 after), the paper's on Arxiv-summarization; novels, not reports; a small target on two cores",
    ours=_ours,
    table=_table,
    chart=_chart,
    whole=True,
    command="python research/long_context.py --text BOOK.txt --lengths 512 2048 8000 --out "
    "benchmarks/long-context-DATE.json",
)
