"""ACL figures 8, 9, 17 and 19 (v1 figure 3): what drafts cost in parameters, memory traffic and arithmetic.

Everything is counted from module shapes (``anabranch.analysis.cost``), so the numbers do not depend on the machine.

    arithmetic intensity = operations of a step / bytes that it reads

Below an accelerator's ratio of arithmetic to bandwidth a step is bound by memory, and intensity over that ratio bounds
the share of its arithmetic that can be in use.
"""

from __future__ import annotations

from typing import Any

from anabranch.analysis.cost import cost, costs, target
from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, DraftShape, attention_operations, matrix_weights
from studies.base import Chart, Line, Result, Setup, Study, Table

__all__ = ["STUDY", "step"]

OVERHEAD, STEPS = "Llama-2-13B", "OPT-1.3b"  # the models of figures 8 and 9, and of 17 and 19
GAMMA, CONTEXT = 4, 1024
SHOWN = ("draft model", "lookahead", "medusa", "hydra", "eagle", "streams", "streams, optimised")
# A100 80GB SXM, from its data sheet: dense 16-bit operations and bytes per second
A100 = 312e12 / 2.039e12
# nodes that are verified: the draft model's chain, and the papers' trees (ACL section N.1)
VERIFIED = {"plain decoding": 1, "draft model": 1 + GAMMA, "medusa": 64, "streams, optimised": 32}
RIDING = 32


def step(name: str, model: str = STEPS) -> dict[str, float]:
    """Operations and bytes of one step of a method, draft included, and the bytes that are read before the pass."""
    decoder, shape = target(model), DraftShape(gamma=GAMMA, context=CONTEXT, nodes=RIDING)
    config, weights = decoder.config, matrix_weights(decoder)
    per_row = 2 * weights + config.num_layers * attention_operations(config, CONTEXT)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * CONTEXT
    draft = DraftCost(0, 0, 0) if name == "plain decoding" else cost(name, model, shape)
    operations = VERIFIED[name] * per_row + draft.operations
    read = WEIGHT_BYTES * (weights + cache) + draft.read
    return {
        "operations": operations,
        "bytes": read,
        "intensity": operations / read,
        "serial_share": draft.read / read if name == "draft model" else 0.0,
    }


def _measure(setup: Setup) -> dict[str, Any]:
    found = costs(OVERHEAD, DraftShape(gamma=GAMMA, context=CONTEXT), methods=SHOWN)
    riding = costs(OVERHEAD, DraftShape(gamma=GAMMA, context=CONTEXT, nodes=RIDING), methods=SHOWN)
    drafts = {
        name: {
            "parameters": each.parameters,
            "bytes": each.read,
            "operations": each.operations,
            "operations_riding": riding[name].operations,
        }
        for name, each in found.items()
    }
    steps = {name: {key: round(value, 4) for key, value in step(name).items()} for name in VERIFIED}
    return {"model": OVERHEAD, "drafts": drafts, "step_model": STEPS, "steps": steps, "a100_ratio": round(A100, 1)}


def _ours(result: Result) -> str:
    drafts, steps = result["drafts"], result["steps"]
    times = drafts["medusa"]["parameters"] / drafts["streams"]["parameters"]
    return (
        f"{times:,.0f} times fewer parameters than Medusa (lossless streams); operations per byte: plain "
        f"{steps['plain decoding']['intensity']:.1f}, streams {steps['streams, optimised']['intensity']:.1f}, draft "
        f"model {steps['draft model']['intensity']:.1f}"
    )


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for name in dict.fromkeys([*result["drafts"], *result["steps"]]):
        draft, one = result["drafts"].get(name), result["steps"].get(name)
        counted = ["-"] * 4
        if draft is not None:
            counted = [f"{draft['parameters']:.2e}", f"{draft['bytes'] / 1e6:,.1f}"]
            counted += [f"{draft[key] / 1e9:,.2f}" for key in ("operations", "operations_riding")]
        intensity = ["-"] * 3
        if one is not None:
            share = min(1.0, one["intensity"] / result["a100_ratio"])
            intensity = [f"{one['intensity']:.1f}", f"{share:.1%}", f"{one['serial_share']:.0%}"]
        rows.append([name, *counted, *intensity])
    titles = (
        f"draft ({result['model']})",
        "parameters",
        "megabytes read",
        "10⁹ operations",
        f"riding on {RIDING} nodes",
        f"operations per byte of a step ({result['step_model']})",
        "at most of an A100's arithmetic",
        "of its reads before the target's pass",
    )
    return titles, rows


def _chart(result: Result) -> Chart:
    steps = result["steps"]
    lines = [Line("a decoding step", list(steps), [each["intensity"] for each in steps.values()])]
    return Chart(f"Arithmetic intensity, {result['step_model']}", "", "operations per byte read", lines, kind="bars")


STUDY = Study(
    name="overhead",
    papers="ACL figures 8, 9, 17 and 19, v1 figure 3",
    title="Parameters, memory traffic, arithmetic and utilisation",
    measures=f"Counts from module shapes. Left, a draft of {GAMMA} tokens on top of the target's own pass "
    f"({OVERHEAD}, 16 bits, {CONTEXT:,} tokens of context). Right, a whole step of {STEPS}, with as many verified "
    f"nodes as in the papers: {VERIFIED['medusa']} for Medusa, {RIDING} for streams, a chain of {GAMMA} for the draft "
    "model OPT-125m. A draft model's reads come one after the other, before the target's pass.",
    paper="no values in the text but over 1,000 times fewer parameters than Medusa "
    "(for shared streams: 8.2E4 against 5.9E8), and more utilisation than with a draft model",
    differs="upper bounds from counts, where the papers profile an A100; not yet run on a GPU. The parameters of "
    "every target that the papers print are in [the comparison](comparison.md#parameters-on-the-papers-targets), "
    "their limits in [theory](theory.md#what-a-draft-costs)",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
)
