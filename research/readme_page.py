"""Write the figures of README.md from the newest result files: the speed, the table of methods, the table of engines.

    python research/readme_page.py            # write
    python research/readme_page.py --check    # write nothing; exit 1 if README.md would change

Each part stands between two comments, ``<!-- NAME: research/readme_page.py -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark_tables import table
from comparison_tables import alone, largest
from comparison_tables import methods as measured
from generated import ROOT, Result, between, newest, write_or_check
from targets import LLAMA, Run, machine, ours, over, peer, run_of

README = "README.md"
SCRIPT = "research/readme_page.py"
DEFAULT, LARGE, SMALL = "SmolLM2-135M", "Qwen2.5-Coder-1.5B", "Qwen2.5-Coder-0.5B"
PEERS = {
    "llama.cpp": "llama.cpp",
    "llama.cpp-ngram": "llama.cpp, n-grams",
    "llama.cpp-draft": "llama.cpp, the 0.5B drafts",
    "openvino": "OpenVINO, int4",
    "openvino-lookup": "OpenVINO, int4, prompt lookup",
}
OURS = {
    "auto": "**anabranch, `auto`**",
    "none": "anabranch, plain decoding",
    "draft_model": "anabranch, `draft_model` (the 0.5B)",
}
FEWER = "\u00b9"
METHODS = {  # name in the comparison -> (name of the drafter, how it drafts, its page)
    "streams": ("streams", "the target's top layers, with trained streams", "streams"),
    "paper-lossless:placement=ride": (
        "paper-lossless",
        "as in the paper: with adapters in place of MLPs",
        "streams",
    ),
    "hydra": ("hydra", "heads that read the tokens drafted before theirs", "hydra"),
    "medusa": ("medusa", "heads on the target's last state", "medusa"),
    "medusa-paper:tree=sparse": ("medusa-paper", "as in the paper: with heads over the vocabulary", "medusa"),
    "eagle": ("eagle", "one trained layer continues the target's features", "eagle"),
    "rest:data=rest": ("rest", "retrieval from a datastore of the target's texts", "rest"),
    "ngram:data=ngram": ("ngram", "a trigram model counted from such texts", "ngram"),
    "suffix": ("suffix", "copies from a suffix tree of text and outputs", "suffix"),
    "prompt_lookup": ("prompt_lookup", "copies what followed the same n-gram earlier", "prompt_lookup"),
    "lookahead": ("lookahead", "Jacobi iteration fills a pool of n-grams", "lookahead"),
}
OTHERS = {"medusa2": "medusa", **{name: name for name in ("space", "draft_model", "staged", "quantized_draft")}}
TRAINED = "1.0 to 2.1 million tokens of the target's own texts, `eagle` on 0.4"
Record = Mapping[str, Any]


def source(stem: str) -> str:
    return f"[{stem}](benchmarks/{stem}.json)"


def _newest(target: str, beside: Run | None = None) -> Run:
    run = run_of(target, "spec_bench", beside)
    assert run is not None, f"benchmarks/ has no result of {target} on spec_bench beside llama.cpp"
    return run


def _stored(run: Run) -> str:
    """A file's rates and ratios, in words."""
    auto, plain, theirs = ours(run, "auto"), ours(run, "none"), peer(run, LLAMA)
    assert theirs is not None
    return (
        f"{auto['tokens_per_second']:.0f} tokens/s, **{over(auto, theirs):.1f} times llama.cpp** and "
        f"{over(auto, plain):.1f} times our plain decoding"
    )


def speed() -> list[str]:
    """Make the first bullets: both files as they are stored, and the default model."""
    large, default = _newest(LARGE), _newest(DEFAULT)
    small = _newest(SMALL, beside=large)
    full, packed = ours(default, "auto"), ours(default, "auto", "int4")
    transformers, llama = peer(default, "transformers"), peer(default, LLAMA)
    assert transformers is not None
    assert llama is not None
    counts = (large.prompts, small.prompts)
    prompts = str(counts[0]) if counts[0] == counts[1] else f"{counts[0]} and {counts[1]}"
    return [
        f"- **Your GGUF file as it is stored**, without a second rounding: {LARGE} in Q4_K_M at {_stored(large)}; "
        f"the 0.5B at {_stored(small)} ({prompts} prompts of Spec-Bench, {machine(large)}; "
        f"[1.5B](benchmarks/{large.stem}.json), [0.5B](benchmarks/{small.stem}.json)).",
        "- **No account, no hub**: the default model (135M) comes through pip and decodes "
        f"{over(full, transformers):.1f} times as fast as `transformers` in the same bf16, in int4 "
        f"{over(packed, llama):.1f} times as fast as `llama.cpp` ({machine(default)}; "
        f"[result](benchmarks/{default.stem}.json)).",
    ]


def _engine(record: Record) -> str | None:
    """The name of a contender in the table; None for those that are not in it."""
    name = record["spec"].split(":")[0]
    if record["kind"] == "peer":
        return PEERS.get(name)
    return OURS.get(name, f"anabranch, `{record['spec']}`")


def _cells(run: Run) -> dict[str, list[str]]:
    """Tokens/s, times llama.cpp and passes per token by engine."""
    llama, cells = peer(run, LLAMA), {}
    assert llama is not None
    for record in sorted(run.records, key=lambda record: float(record["tokens_per_second"])):
        if (name := _engine(record)) is None:
            continue
        passes = "-"
        if record["kind"] == "ours":
            passes = f"{record['target_calls_per_token']:.2f} + {record['draft_calls_per_token']:.2f}"
        mark = FEWER if "every" in record else ""
        cells[name] = [f"{record['tokens_per_second']:.0f}{mark}", f"{over(record, llama):.1f}", passes]
    return cells  # the last of a name is the fastest


def engines() -> list[str]:
    """Every contender on the 1.5B, the fastest first."""
    suites = [run for suite in ("spec_bench", "humaneval") if (run := run_of(LARGE, suite)) is not None]
    first = suites[0]
    cells = [_cells(run) for run in suites]
    names = dict.fromkeys(name for found in cells for name in reversed(found))
    rows = [(name, *(cell for found in cells for cell in found.get(name, ["-"] * 3))) for name in names]
    titles = [
        "engine",
        *(
            f"{run.suite}: {title}"
            for run in suites
            for title in ("tokens/s", "times llama.cpp", "passes/token, target + draft")
        ),
    ]
    gains = " and ".join(
        f"{middle:.2f} ({low:.2f}-{high:.2f}) on {run.suite}"
        for run in suites
        for low, middle, high in [ours(run, "auto")["speedup_quartiles"]]
    )
    few = {record["prompts"] for run in suites for record in run.records if "every" in record}
    fewer = f" {FEWER}\u00a0On {min(few)} of these prompts." if few else ""
    counted = " and ".join(f"{run.prompts} prompts of {run.suite}" for run in suites)
    return [
        f"Every engine on the same file, {LARGE}-Instruct in Q4_K_M (1.12 GB); {machine(first)}; {counted}, greedy, "
        f"{first.result['run']['max_new_tokens']} new tokens, one prompt at a time; rates include reading the prompt "
        f"({', '.join(run.source for run in suites)}). Speculation alone gives a factor of {gains} (medians over "
        f"prompts, quartiles), the kernels the rest. [Three targets](docs/benchmarks/engines.md), "
        f"[pass costs](docs/benchmarks/sizes.md).{fewer}",
        "",
        *table(titles, rows)[:-1],
    ]


def methods(stem: str, result: Result) -> list[str]:
    """Mean acceptance length, cost and speed of each method on one row."""
    run, weights = result["run"], result["run"]["weights"][0]
    found = {method["name"]: method for method in measured(result)}
    rows = []
    for name, (drafter, how, page) in METHODS.items():
        records = alone(found[name], weights)
        sized, best = largest(records), max(records, key=_speedup)
        assert sized is not None, f"{stem} has no draft of a fixed size of {name}"
        cells = (f"{sized['mean_acceptance_length']:.2f}", f"{sized['relative_step']:.2f}")
        size = "" if best["name"] == "as given" else f", {best['name']}"
        parameters = _millions(found[name]["facts"]["extra_parameters"])
        rows.append((_linked(drafter, page), how, parameters, *cells, f"{_speedup(best):.2f}{size}"))
    titles = (
        "method",
        "drafts with",
        "parameters",
        "mean acceptance length",
        "step",
        "times plain decoding, best size",
    )
    model = run["model"].removesuffix(".gguf")
    return [
        *table(titles, rows, left=2),
        "Mean acceptance length: tokens per target pass, greedy. Step: its time over that of a plain step. Both with "
        f"{run['budgets'][-1]} draft nodes (`lookahead`: its window). {model} as stored, {run['limit']} prompts of "
        f"Spec-Bench, one at a time, {machine(Run(stem, result))}, where arithmetic limits a pass; adapters are "
        f"trained on {TRAINED}, and tables count 1.6 M ({source(stem)}; [more, and on a GPU](docs/comparison.md)). "
        f"Not in that run: {', '.join(_linked(drafter, page) for drafter, page in OTHERS.items())}.",
    ]


def _has_all(result: Result) -> bool:
    """Return whether a comparison has every method of the table."""
    return METHODS.keys() <= {method["name"] for method in measured(result)}


def _linked(drafter: str, page: str) -> str:
    return f"[`{drafter}`](docs/methods/{page}.md)"


def _speedup(record: Record) -> float:
    return float(record["speedup_quartiles"][1])


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,}"


def outputs() -> dict[str, str]:
    """README.md with its generated parts renewed."""
    text = (ROOT / README).read_text(encoding="utf-8")
    compared = newest("methods-qwen2.5-coder-0.5b-*2cores-*.json", _has_all)
    assert compared is not None
    for name, lines in {"speed": speed(), "methods": methods(*compared), "engines": engines()}.items():
        text = between(README, text, (f"<!-- {name}: {SCRIPT} -->", f"<!-- end of {name} -->"), lines)
    return {README: text}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
