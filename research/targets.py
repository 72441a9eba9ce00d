"""The newest results of the three real targets: the default model and Qwen2.5-Coder in 1.5B and 0.5B, on two suites."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from generated import results

__all__ = ["LLAMA", "MACHINES", "SUITES", "TARGETS", "Run", "by_machine", "machine", "ours", "over", "peer", "run_of"]

# all of these processors report the same name, so machines are told apart by the names of the result files
MACHINES = {
    "epyc-zen5-2cores": "AMD EPYC (Zen 5)",
    "epyc-avx512-2cores": "AMD EPYC (Zen 5)",
    "epyc-zen4-2cores": "AMD EPYC (Zen 4)",
    "epyc-avx2-2cores": "AMD EPYC, AVX2",
    "xeon-amx-2cores": "Intel Xeon with AMX",
}
TARGETS = {  # name -> how the names of its result files begin
    "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b-",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b-",
    "SmolLM2-135M": "",
}
SUITES = {"spec_bench": "Spec-Bench", "humaneval": "HumanEval"}
LLAMA = "llama.cpp"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A comparison of drafters and peers on one target and suite; ``stem`` is the name of its file."""

    stem: str
    result: Mapping[str, Any]

    @property
    def records(self) -> list[Record]:
        """The contenders that were measured."""
        return [record for record in self.result["contenders"] if "error" not in record]

    @property
    def suite(self) -> str:
        """Its name in words."""
        return SUITES[self.result["run"]["suite"]]

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return int(self.result["prompts_done"])

    @property
    def source(self) -> str:
        """A link to the file, from the root."""
        return f"[{self.stem}](benchmarks/{self.stem}.json)"


def machine(run: Run) -> str:
    """Processor and number of cores."""
    name = next((name for key, name in MACHINES.items() if key in run.stem), run.result["environment"]["processor"])
    return f"{run.result['environment']['threads']} cores of an {name}"


def peer(run: Run, name: str) -> Record | None:
    """The fastest record of a peer, in whatever build or format."""
    found = [r for r in run.records if r["kind"] == "peer" and re.fullmatch(rf"{re.escape(name)}(:.*)?", r["spec"])]
    return max(found, key=lambda record: float(record["tokens_per_second"]), default=None)


def ours(run: Run, spec: str, weights: str = "none") -> Record:
    """Our record with this drafter and these weights."""
    return next(r for r in run.records if r["kind"] == "ours" and (r["spec"], r["weights"]) == (spec, weights))


def over(record: Record, other: Record) -> float:
    """The ratio of tokens/s in total, over the prompts that both decoded."""
    strides = [one.get("every", 1) for one in (record, other)]
    if strides == [1, 1]:
        return float(record["tokens_per_second"]) / float(other["tokens_per_second"])
    counts, rates = (
        [
            dict(zip(range(0, 10**9, every), one[key], strict=False))
            for one, every in zip((record, other), strides, strict=True)
        ]
        for key in ("tokens_by_prompt", "tokens_per_second_by_prompt")
    )
    both = counts[0].keys() & counts[1].keys()
    totals = [
        sum(n[i] for i in both) / sum(n[i] / rate[i] for i in both) for n, rate in zip(counts, rates, strict=True)
    ]
    return totals[0] / totals[1]


def runs(target: str, suite: str) -> Iterator[Run]:
    """All results of a target as it is stored, on a suite, one prompt at a time, beside llama.cpp."""
    begin = TARGETS[target]
    for stem, result in results(f"{begin}{suite.replace('_', '-')}-*.json").items():
        run = Run(stem, result)
        settings = run.result.get("run", {})
        alone = settings.get("suite") == suite and settings.get("rows", 1) == 1
        if alone and settings["temperature"] == 0 and run.result["complete"] and peer(run, LLAMA) is not None:
            yield run


def by_machine(target: str, suite: str) -> list[Run]:
    """The newest of ``runs`` on each kind of machine, of one day that of the most prompts; the newest first."""
    found: dict[str, Run] = {}
    every = sorted(runs(target, suite), key=lambda run: (run.result["environment"]["date"], run.prompts, run.stem))
    for run in reversed(every):
        found.setdefault(machine(run), run)
    return list(found.values())


def run_of(target: str, suite: str, beside: Run | None = None) -> Run | None:
    """The newest run of a target and suite; if ``beside`` is given, the newest on the same kind of machine."""
    found = by_machine(target, suite)
    return next((run for run in found if beside is None or machine(run) == machine(beside)), None)
