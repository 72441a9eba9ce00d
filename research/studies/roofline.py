"""Spector and Ré figure 1: where decoding with few rows lies under this machine's roofs.

    operations per byte = operations of a pass / bytes of weights that it reads
    roof                = min(matrix rate, operations per byte * read bandwidth)

The passes are those of ``anabranch bench shape``, which measures the machine's bandwidth and matrix rate as well.
"""

from __future__ import annotations

from typing import Any

from studies.base import Chart, Line, Result, Study, Table

__all__ = ["STUDY", "points"]

# weights of the embedding table, which a result counts beside the output head: a pass reads one row of it a token
EMBEDDINGS = {
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": 151_936 * 896,
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": 151_936 * 1536,
    "Llama-2-7B": 32_000 * 4096,
}
PLAIN, VERIFY = "plain", "verify"


def points(result: Result) -> list[dict[str, Any]]:
    """A pass by model and rows: operations per byte, rate, and the roof over it, in 10⁹ operations a second."""
    passes = []
    for timed in result["timed"]:
        if timed["model"] not in EMBEDDINGS:
            continue
        machine = timed["machine"]
        read, rate, megabytes = machine["read_gb_s"][1], 1e3 * machine["matrix_tflop_s"][1], machine["weight_mb"]
        per_row = 2e-9 * (timed["parameters"] - EMBEDDINGS[timed["model"]])
        for step in timed["steps"]:
            if step["kind"] != PLAIN and not step["kind"].startswith(VERIFY):
                continue
            rows = round(step["nodes"])
            intensity = 1e3 * rows * per_row / megabytes
            passes.append(
                {
                    "model": timed["model"].removesuffix(".gguf"),
                    "kind": step["kind"],
                    "rows": rows,
                    "ms": step["ms"][1],
                    "intensity": intensity,
                    "rate": 1e3 * rows * per_row / step["ms"][1],
                    "roof": min(rate, intensity * read),
                    "matrix": rate,
                    "ridge": rate / read,
                }
            )
    return passes


def _verified(result: Result) -> list[dict[str, Any]]:
    return [point for point in points(result) if point["kind"] != PLAIN]


def _ours(result: Result) -> str:
    plain = [point for point in points(result) if point["kind"] == PLAIN]
    shares = (
        f"{point['model']}: {point['intensity']:.1f} operations a byte, {point['rate'] / point['matrix']:.0%} of the "
        f"arithmetic, {point['rate'] / point['roof']:.0%} of its roof"
        for point in plain
    )
    return f"one row: {'; '.join(shares)}; the roofs meet at {plain[-1]['ridge']:.0f} operations a byte"


def _table(result: Result) -> Table:
    rows: list[list[object]] = [
        [
            point["model"],
            point["rows"],
            f"{point['ms']:.1f}",
            f"{point['intensity']:.1f}",
            f"{point['rate']:.0f}",
            f"{point['roof']:.0f}",
            f"{point['rate'] / point['matrix']:.0%}",
        ]
        for point in _verified(result)
    ]
    return (
        "model",
        "rows of the pass",
        "pass, ms",
        "operations per byte",
        "10⁹ operations/s",
        "the roof over it",
        "share of the matrix rate",
    ), rows


def _chart(result: Result) -> Chart:
    verified = _verified(result)
    lines = []
    for model in dict.fromkeys(point["model"] for point in verified):
        mine = [point for point in verified if point["model"] == model]
        lines.append(Line(model, [point["intensity"] for point in mine], [point["rate"] for point in mine]))
    ends = sorted(verified, key=lambda point: float(point["intensity"]))
    roof = [(point["intensity"], point["roof"]) for point in ends if point["model"] == ends[-1]["model"]]
    roof.insert(0, (ends[0]["intensity"], ends[0]["intensity"] * roof[-1][1] / ends[-1]["ridge"]))
    lines.append(Line("the roof", *zip(*roof, strict=True), faint=True))
    return Chart("Passes of 1 to 32 rows under the roof", "operations per byte", "10⁹ operations/s", lines)


STUDY = Study(
    name="passes_by_nodes",
    papers="Spector and Ré figure 1",
    title="Small batches under the roofs of memory and arithmetic",
    measures="Operations per byte of weights, and operations a second, of passes of 1 to 32 rows behind 512 tokens. "
    "The roof is the lower of the matrix rate and of the bytes that memory delivers in the meantime, both measured "
    "in the same run; the matrix rate is that of bf16, and weights of four bits are multiplied in int8, so that "
    "passes of many rows can lie above it. Llama-2-7B has weights of noise in its shape.",
    paper="GPT-2 Large with one row on an RTX 4090: about 1 operation a byte, 0.13 % of the arithmetic in use",
    differs="two CPU cores, whose roofs meet at ten operations a byte instead of some hundreds: few rows are idle; "
    "weights of four bits, so more operations a byte with one row",
    ours=_ours,
    table=_table,
    chart=_chart,
    command="anabranch bench shape default default@int4 FILE.gguf 7b@Q4_K --width 1 --width 2 --width 4 --width 8 "
    "--width 16 --width 32 --repeats 3 --out benchmarks/passes-by-nodes-MACHINE-DATE.json",
)
