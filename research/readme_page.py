"""Write the figures of README.md from the newest result files: the speed, the table of methods, the table of engines.

    python research/readme_page.py            # write
    python research/readme_page.py --check    # write nothing; exit 1 if README.md would change

Each part stands between two comments, ``<!-- NAME: research/readme_page.py -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from benchmark_tables import table
from generated import ROOT, write_or_check

BENCHMARKS, README = ROOT / "benchmarks", "README.md"
SCRIPT = "research/readme_page.py"
MACHINES = {"epyc-avx512-2cores": "AMD EPYC (Zen 5)", "epyc-zen4-2cores": "AMD EPYC (Zen 4)"}  # by name of the file
FORMATS = {"none": "bf16", "int8": "int8", "int4": "int4", "bfloat16": "bf16", "SmolLM2-135M-Instruct.Q4_1": "Q4_1"}
NAMES = {"openvino": "OpenVINO", "llama.cpp": "llama.cpp", "transformers": "transformers"}
OURS = {"auto": "**anabranch, `auto`**", "none": "anabranch, plain decoding"}
COPY, MARK = "a 4-bit copy of the target", "\u00b9"
COPIED = ("methods-epyc-avx512-2cores-2026-11-25",)  # older than the method's own name: streams had the copy by default
REFERENCE, QUANTISED = "transformers", "llama.cpp"
METHODS = {  # name in the comparison -> (name of the drafter, how it drafts, its page)
    "streams": ("streams", "the target's top layers, with trained streams", "streams"),
    "eagle": ("eagle", "one trained layer continues the target's features", "eagle"),
    "hydra": ("hydra", "heads that read the tokens drafted before theirs", "hydra"),
    "medusa": ("medusa", "heads on the target's last state", "medusa"),
    "medusa2": ("medusa2", "the same, trained together with the target", "medusa"),
    "space": ("space", "trained mask tokens after every node", "space"),
    "draft-model": ("draft_model", "a smaller model with the same vocabulary", "draft_model"),
    "staged": ("staged", "a draft model that is itself drafted for", "staged"),
    "quantized_draft": ("quantized_draft", "a 4-bit copy of the target", "quantized_draft"),
    "prompt_lookup": ("prompt_lookup", "copies what followed the same n-gram earlier", "prompt_lookup"),
    "suffix": ("suffix", "the same, with a suffix tree of text and outputs", "suffix"),
    "lookahead": ("lookahead", "Jacobi iteration fills a pool of n-grams", "lookahead"),
    "ngram": ("ngram", "an n-gram model counted from text", "ngram"),
    "rest": ("rest", "retrieval from a datastore of text", "rest"),
}
Result = Mapping[str, Any]
Record = Mapping[str, Any]


def newest(pattern: str) -> tuple[str, Result]:
    """Stem and content of the newest matching result that has peers or methods."""
    found = [(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in BENCHMARKS.glob(pattern)]
    whole = [(stem, result) for stem, result in found if result.get("compared") or peers(result)]
    return max(whole, key=lambda each: (each[1]["environment"]["date"], each[0]))


def peers(result: Result) -> list[Record]:
    """The other engines that were measured at one row."""
    alone = result.get("run", {}).get("rows", 1) == 1
    return [r for r in result.get("contenders", ()) if alone and r["kind"] == "peer" and "error" not in r]


def ours(result: Result, spec: str, weights: str) -> Record:
    """Our record with this drafter and these weights."""
    return next(r for r in result["contenders"] if r["kind"] == "ours" and (r["spec"], r["weights"]) == (spec, weights))


def where(stem: str, result: Result) -> str:
    """Processor and number of cores."""
    machine = next((name for key, name in MACHINES.items() if key in stem), result["environment"]["processor"])
    return f"{result['environment']['threads']} cores of an {machine}"


def source(stem: str) -> str:
    return f"[{stem}](benchmarks/{stem}.json)"


def speed(stem: str, result: Result) -> list[str]:
    """Make the first bullet."""
    rates = {r["name"]: r["tokens_per_second"] for r in peers(result)}
    full, small = (ours(result, "auto", weights)["tokens_per_second"] for weights in ("none", "int4"))
    return [
        f"- **{full / rates[REFERENCE]:.1f} times `transformers`** on {where(stem, result)} with the same bf16 "
        f"weights, and **{small / rates[QUANTISED]:.1f} times `llama.cpp`**, both with 4-bit weights: {full:.0f} "
        f"and {small:.0f} tokens/s, greedy, {result['prompts_done']} prompts of Spec-Bench ({source(stem)})."
    ]


def engines(stem: str, result: Result) -> list[str]:
    """Tokens/s of every engine, the fastest first."""
    base = next(r["tokens_per_second"] for r in peers(result) if r["name"] == REFERENCE)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for spec, name in OURS.items():
        for weights in ("none", "int4"):
            record = ours(result, spec, weights)
            copied = any(source.startswith(("lead ", "quantized ")) for source in record["sources"])
            length = f"{record['mean_acceptance_length']:.2f}{MARK if copied else ''}"
            rows.append((record["tokens_per_second"], (name, FORMATS[weights], length)))
    for record in peers(result):
        if record["name"].split(":")[0].split("-")[0] not in NAMES:
            continue
        engine, *method = record["name"].split(":")[0].split("-")
        name = NAMES.get(engine, engine) + (" with prompt lookup" if method == ["lookup"] else "")
        weights = record.get("info", {}).get("weights", "")
        rows.append((record["tokens_per_second"], (name, FORMATS.get(weights, weights), "-")))
    rows.sort(key=lambda row: -row[0])
    cells = [(name, kind, f"{rate:.0f}", f"{rate / base:.1f}", length) for rate, (name, kind, length) in rows]
    gains = [ours(result, "auto", weights)["speedup_quartiles"] for weights in ("none", "int4")]
    full, small = (f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in gains)
    note = f" {MARK}\u00a0Some drafts begin with tokens of {COPY}." if any(MARK in row[-1] for row in cells) else ""
    titles = ("engine", "weights", "tokens/s", "times transformers", "mean acceptance length")
    return [
        f"The default model (135M) on {where(stem, result)}, {result['prompts_done']} prompts of Spec-Bench, greedy, "
        f"{result['run']['max_new_tokens']} new tokens, one prompt at a time ({source(stem)}). Speculation alone is "
        f"worth a factor of {full} in bf16 and {small} in int4, medians over prompts with quartiles; the native "
        f"kernels give the rest.{note}",
        "",
        *table(titles, cells, left=2)[:-1],
    ]


def methods(stem: str, result: Result) -> list[str]:
    """Mean acceptance length and cost of each method."""
    compared = {method["name"]: method for method in result["compared"]}
    rows, left, copied = [], [], False
    for name, (drafter, how, page) in METHODS.items():
        cells = [f"[`{drafter}`](docs/methods/{page}.md)", how]
        record = largest(compared.get(name))
        if record is None:
            left.append(drafter)
            continue
        mark = MARK if drafter == "streams" and stem in COPIED else ""
        copied |= bool(mark)
        facts = compared[name]["facts"]
        cells += [_millions(facts["extra_parameters"])]
        cells += [f"{facts['seconds'] / 60:.0f}" if facts.get("seconds") else "0"]
        rows.append([*cells, f"{record['mean_acceptance_length']:.2f}{mark}", f"{record['relative_step']:.2f}"])
    run = result["run"]
    titles = ("method", "drafts with", "parameters", "training, min", "mean acceptance length", "step")
    others = ", ".join(
        f"[`{drafter}`](docs/methods/{page}.md)" for drafter, _, page in METHODS.values() if drafter in left
    )
    return [
        *table(titles, rows, left=2),
        f"Mean acceptance length: tokens per target pass, greedy. Step: its time over that of a plain step. "
        f"{run['budgets'][-1]} draft nodes, one row, bf16, {run['limit']} prompts, adapters trained on the same 100 k "
        f"tokens ({source(stem)}; [more](docs/comparison.md)). Not in that run: {others}."
        + (f" {MARK}\u00a0The streams continue drafts of {COPY}." if copied else ""),
    ]


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,}"


def largest(method: Result | None) -> Record | None:
    """The record of the largest node budget at one row in bf16."""
    records = method["parts"].get("1 row, none", []) if method else []
    fixed = [r for r in records if r["name"] not in ("none", "auto", "rejection") and "error" not in r]
    return fixed[-1] if fixed else None


def outputs() -> dict[str, str]:
    """README.md with its generated parts renewed."""
    text = (ROOT / README).read_text(encoding="utf-8")
    comparison, compared = newest("spec-bench-*.json"), newest("methods-*.json")
    parts = {"speed": speed(*comparison), "methods": methods(*compared), "engines": engines(*comparison)}
    for name, lines in parts.items():
        first, last = f"<!-- {name}: {SCRIPT} -->", f"<!-- end of {name} -->"
        if not re.search(f"{first}.*?{last}", text, re.DOTALL):
            raise SystemExit(f"{README} must contain '{first}' and '{last}' once each, in this order")
        before, after = text.split(first)[0], text.split(last)[1]
        text = before + "\n".join([first, *lines, last]) + after
    return {README: text}


if __name__ == "__main__":
    write_or_check(SCRIPT.partition("/")[2], (__doc__ or "").splitlines()[0], outputs)
