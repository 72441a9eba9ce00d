"""Set each constant of the controller neutral, or to half and twice its value, and simulate what that costs.

A simulated machine decodes texts that differ in how well they can be drafted: with costs of passes that were measured
for the default model, times that vary and are interrupted now and then, at 1 to 32 rows, with cheap and dear drafters.
The table shows tokens per second relative to the constant's own value (geometric mean over all situations), and the
worst situation. Everything but the constant is the same, random numbers included. The constants of the choice between
drafters are judged by texts for which one of three drafters is the fastest, and later another one.

    python research/ablate_controller.py --texts 40 --out benchmarks/ablation-DATE.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.control import choice, controller, costs
from anabranch.control.controller import Controller
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.drafting.drafter import Row, Traits
from anabranch.methods.none import NoDrafter
from anabranch.sampling import SamplingParams
from anabranch.support.files import shown_command, write_atomically
from anabranch.tree import DraftTree

PASSES = {  # milliseconds by nodes, of the default model on two cores with AVX-512 and of a 7B shape
    "bf16": "1:2.7/3:3.4/6:4.4/8:5.1/9:6/12:6.8/16:8.2/24:11/32:14/64:26/128:50/512:200",
    "int4": "1:2.3/3:2.6/6:3.2/8:3.6/9:5/12:5.6/16:6.6/24:9.4/32:12/64:23/128:45/512:180",
    "7B": "1:150/8:155/16:175/32:285/64:560/128:1100/512:4400",
}


@dataclass(frozen=True)
class Kind:
    """A drafter: milliseconds of drafting by mode, for a row and each node, in plain passes; and acceptance by mode."""

    name: str
    fixed: Mapping[int, float]
    node: float
    accepted: Mapping[int, float]
    traits: Traits


KINDS = (
    Kind("streams", {1: 0.01, 2: 0.25}, 0.02, {1: 0.1, 2: 0.62}, Traits("some")),
    Kind("eagle", {2: 1.2}, 0.05, {2: 0.65}, Traits()),
)


BY_NAME = {kind.name: kind for kind in KINDS}
YIELD = "yield"  # no constant: whether plans are corrected by what steps yielded


class Simulated(NoDrafter):
    """A drafter of chains, for the controller."""

    adaptive, max_nodes = True, 16

    def __init__(self, kind: Kind) -> None:
        self.name, self.traits = kind.name, kind.traits


def decode(
    kind: Kind, table: str, rows: int, texts: int, *, seed: int = 0, mode: int | None = None, changing: bool = False
) -> float:
    """Tokens per millisecond of texts, ``rows`` at a time; ``mode`` 0 decodes plainly.

    changing  texts of 512 tokens instead of 128, whose ease changes every 128 tokens, on a machine that interrupts a
              step in 250 for 40 times its length, not 5, and on which drafts take five times as long during 60 of 600
              steps
    """
    truth, noise = StepCosts.parse(table), np.random.default_rng(seed)
    made = Controller(Costs(PassCosts(StepCosts.parse("1:1/8:1.2/12:1.5/24:2.6"), busy=True)), ragged=True)
    drafter, sampling = Simulated(kind), SamplingParams()
    plain = float(truth(np.array(1)))
    ease = np.exp((0.8 if changing else 0.35) * noise.standard_normal(4 * (texts + rows)))  # of texts
    steps = 0
    left, easy, started = [0.0] * rows, [1.0] * rows, 0
    each = [Row([9] * 100, 1, sampling) for _ in range(rows)]
    total = spent = 0.0
    while started < texts:
        for b in range(rows):
            if left[b] <= 0:
                left[b] = 512.0 if changing else 128.0
                started += 1
                made.joined(drafter, rows)
            easy[b] = ease[4 * started + int(max(0.0, left[b]) // 128) % 4]
        steps += 1
        plan = made.plan({drafter: rows}, 100.0)[drafter]
        if mode == 0:
            plan = controller.Plan(0)
        trees, shares = [], []
        for b in range(rows):
            local = easy[b] * math.exp(0.3 * noise.standard_normal())
            share = min(0.95, kind.accepted.get(plan.mode, 0.0) ** (1 / local))
            count = max(0, plan.nodes - 1) if plan.nodes != 1 else (4 if noise.random() < 0.2 else 0)
            stated = min(0.97, share * math.exp(0.1 + 0.1 * noise.standard_normal()))
            logs = (np.arange(1, count + 1) * math.log(stated)).tolist() if count else []
            trees.append(DraftTree.chain(9, [1] * count, log_probs=logs))
            shares.append(share)
        if plan.nodes:
            trees = made.choose(each, [drafter] * rows, trees, {drafter: plan})
        yields = [
            min(tree.size, int(noise.geometric(1 - share)) if share else 1)
            for tree, share in zip(trees, shares, strict=True)
        ]
        nodes = sum(tree.size for tree in trees)
        slow = math.exp(0.03 * noise.standard_normal()) * (
            (40.0 if changing else 5.0) if noise.random() < 0.004 else 1.0
        )
        passed = slow * float(truth(np.array(nodes)))
        # rows share part of a draft's cost, as they share a pass
        drafts = plain * rows**0.8 * (kind.fixed.get(plan.mode, 0.0) + kind.node * plan.nodes * (plan.mode > 1))
        other = slow * (0.1 + 0.02 * rows + drafts * (5.0 if changing and steps % 600 < 60 else 1.0))
        if mode is None:
            made.saw_step(nodes, rows, 100.0, tokens=sum(yields), pass_ms=passed, other_ms=other)
        for b, tokens in enumerate(yields):
            left[b] -= tokens
        total, spent = total + sum(yields), spent + passed + other
    return total / spent


def choose(texts: int, seed: int, *, changing: bool) -> float:
    """Speed of texts of 128 tokens with the drafters that ``Choice`` picks, over that with the fastest one each time.

    changing  after half of the texts, the second drafter becomes the fastest
    """
    noise, made = np.random.default_rng(seed), choice.Choice()
    spent = least = 0.0
    for text in range(texts):
        first = 1.3 if changing and 2 * text >= texts else 1.8
        speedups = {"first": first, "second": 1.5, "third": 0.8}
        name = made.choose(dict.fromkeys(speedups, 1.5), 1)
        ease = math.exp(0.25 * noise.standard_normal())
        for _ in range(8):
            made.saw(name, 1, 16.0, 16.0 / (ease * speedups[name]))
        spent += 1 / speedups[name]
        least += 1 / max(speedups.values())
    return least / spent


@contextmanager
def changed(constant: str, value: Any) -> Iterator[None]:
    """The modules of ``control`` with another value of a constant."""
    modules: list[Any] = [module for module in (controller, costs, choice) if hasattr(module, constant)]
    if constant == YIELD:
        modules, constant = [controller.Plan], "rate"
    before = getattr(modules[0], constant)
    for module in modules:
        setattr(module, constant, value)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, constant, before)


def variants() -> dict[str, dict[str, Any]]:
    """The values of each constant to try by name: the neutral one first."""
    return {
        YIELD: {"off": property(lambda plan: plan.tokens / plan.ms)},
        "BUDGETS": {"all": tuple(range(2, 65)), "two": (4, 16)},
        "PRIOR": {"half": controller.PRIOR / 2, "twice": controller.PRIOR * 2},
        "RATE": {"never": 0.0, "half": controller.RATE / 2, "twice": controller.RATE * 2},
        "SLOW": {"never": 0.0, "half": controller.SLOW / 2, "RATE": costs.RATE},
        "PERIOD": {"1": 1, "half": controller.PERIOD // 2, "twice": controller.PERIOD * 2},
        "NEAR": {"all": 0.0, "none": 1.0},
        "EXPLORE": {"never": 10**9, "half": controller.EXPLORE // 2, "twice": controller.EXPLORE * 2},
        "CLIP": {"none": 1e9, "tight": 1.1},
        "SAMPLE": {"half": choice.SAMPLE / 2, "twice": choice.SAMPLE * 2},
        "OPTIMISM": {"none": 0.0, "half": choice.OPTIMISM / 2, "twice": choice.OPTIMISM * 2},
        "FADING": {"never": 1e9, "half": choice.FADING / 2, "twice": choice.FADING * 2},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=40, help="texts of each situation, for each row in use")
    parser.add_argument("--constant", action="append", help="only this one; repeatable")
    parser.add_argument("--rows", type=int, action="append", help="rows in use; repeatable (default: 1, 4, 8 and 32)")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    situations = [
        (kind, name, rows, changing)
        for kind in KINDS
        for name in PASSES
        for rows in args.rows or (1, 4, 8, 32)
        for changing in (False, True)
    ]

    def chosen() -> dict[str, float]:
        return {
            f"choice {seed}{', changing' if changing else ''}": choose(10 * args.texts, seed, changing=changing)
            for seed in range(16)
            for changing in (False, True)
        }

    def rates(mode: int | None = None) -> dict[str, float]:
        texts = {rows: args.texts + 2 * rows for rows in (1, 2, 4, 8, 16, 32)}
        return {
            f"{kind.name}, {name}, {rows} rows{', changing' if changing else ''}": decode(
                kind,
                PASSES[name],
                rows,
                texts[rows] // 2 + rows if changing else texts[rows],
                mode=mode,
                changing=changing,
            )
            for kind, name, rows, changing in situations
        }

    base, plain, choices = rates(), rates(mode=0), chosen()
    record: dict[str, Any] = {"over plain decoding": {name: round(base[name] / plain[name], 3) for name in base}}
    for name, ratio in record["over plain decoding"].items():
        print(f"{ratio:6.3f}  times plain decoding: {name}", flush=True)
    rows = []
    for constant, values in variants().items():
        if args.constant and constant not in args.constant:
            continue
        for label, value in values.items():
            with changed(constant, value):
                now, before = (chosen(), choices) if hasattr(choice, constant) else (rates(), base)
            ratios = {name: now[name] / before[name] for name in before}
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            worst = min(ratios, key=ratios.__getitem__)
            rows.append(
                {"constant": constant, "value": label, "rate": round(mean, 4), "worst": round(ratios[worst], 3)}
            )
            for what in (False, True):
                some = [math.log(ratio) for name, ratio in ratios.items() if name.endswith("changing") == what]
                rows[-1]["changing" if what else "steady"] = round(math.exp(sum(some) / len(some)), 4)
            rows[-1]["where"] = worst
            shares = f"{mean:7.4f} {rows[-1]['steady']} {rows[-1]['changing']}"
            print(f"{constant:10} {label:8} {shares}  worst {ratios[worst]:.3f} ({worst})", flush=True)
    record["ablation"] = rows
    if args.out is not None:
        import sys

        command = shown_command("python", "research/ablate_controller.py", *sys.argv[1:])
        write_atomically(args.out, json.dumps({"command": command, **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
