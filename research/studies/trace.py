"""Leviathan et al. figure 5, and ACL figures 17 and 19: the passes of a text over time, and how busy they keep it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from anabranch.bench.machine import measure_machine
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.drafting.counting import matrix_weights
from anabranch.errors import InputError
from anabranch.loading import Loaded
from anabranch.methods import make_drafter
from anabranch.model.weights import build_decoder
from studies.base import Chart, Line, Result, Setup, Study, Table

__all__ = ["STUDY"]

PLAIN = "plain decoding"
GAMMAS = (3, 7)  # those of the figure


def _specs(setup: Setup, loaded: Loaded) -> dict[str, str]:
    """Plain decoding and chains of the draft model, as in the figure; streams where the target has an adapter."""
    specs = {PLAIN: "none"}
    specs |= {f"draft model, gamma {n}": f"draft_model:model={setup.draft},tree=chain,tokens={n}" for n in GAMMAS}
    names = {each.method.name for each in loaded.adapters}
    return specs | ({"streams, 4 nodes": "streams:nodes=4"} if "streams" in names else {})


def _decoded(engine: Engine, request: Request) -> Iterator[Step]:
    engine.rehearse(request)
    engine.add(request)
    return engine.run()


def _traced(step: Step) -> list[float]:
    """Milliseconds of drafting, of the target's pass and of the rest, tokens, nodes, passes and MB of both models."""
    drafting, rest = step.timings.draft + step.timings.prepare, step.timings.verify + step.timings.commit
    counted = []
    for mine in (True, False):
        calls = [call for call in step.calls if (call.kind == "target") is mine]
        counted += [len(calls), sum(call.read for call in calls) / 1e6]
    ms = (1e3 * seconds for seconds in (drafting, step.timings.forward, rest))
    return [round(value, 3) for value in (*ms, len(step.tokens), step.tree.size, *counted)]


def _measure(setup: Setup) -> dict[str, Any]:
    if not setup.draft:
        raise InputError("the study draws chains of a smaller model; name it with --draft MODEL")
    loaded = setup.load()
    target, ids = loaded.target.decoder, setup.encoded(loaded.target)[0]
    steps = {}
    for name, spec in _specs(setup, loaded).items():
        setup.report(name)
        drafter = make_drafter(spec, target, *loaded.modules)
        engine = Engine(target, drafter, capacity=len(ids) + setup.new)
        list(_decoded(engine, Request(ids, min(8, setup.new))))  # warm
        steps[name] = [_traced(step) for step in _decoded(engine, Request(ids, setup.new))]
    return {
        "draft": setup.shown_draft,
        "steps": steps,
        "weights": matrix_weights(build_decoder(target.config)),
        "machine": measure_machine(target).to_dict(),
    }


def _sums(steps: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*steps, strict=True)]


def _ours(result: Result) -> str:
    texts = []
    for name, steps in result["steps"].items():
        drafting, passes, rest, tokens, _, mine, _, theirs, _ = _sums(steps)
        texts.append(
            f"{name}: {tokens:.0f} tokens by {mine:.0f} passes and {theirs:.0f} of drafts in "
            f"{drafting + passes + rest:.0f} ms"
        )
    return "; ".join(texts)


def _table(result: Result) -> Table:
    rate, rows = 1e12 * result["machine"]["matrix_tflop_s"][1], []
    for name, steps in result["steps"].items():
        drafting, passes, rest, tokens, nodes, mine, read, theirs, more = _sums(steps)
        whole = drafting + passes + rest
        row = [name, f"{tokens:.0f}", f"{mine:.0f}", f"{theirs:.0f}"]
        row += [f"{ms:.0f} ({ms / whole:.0%})" for ms in (drafting, passes)] + [f"{whole:.0f}"]
        row += [f"{megabytes / ms:.0f}" if megabytes else "-" for megabytes, ms in ((more, drafting), (read, passes))]
        operations = 2 * result["weights"] * nodes
        row += [f"{operations / (1e-3 * ms * rate):.0%}" for ms in (passes, whole)]
        rows.append(row)
    return (
        "decoding",
        "tokens",
        "target passes",
        "draft passes",
        "drafting, ms",
        "target passes, ms",
        "all, ms",
        "GB/s read in drafts",
        "in target passes",
        "arithmetic in use in target passes",
        "over all",
    ), rows


def _chart(result: Result) -> Chart:
    lines = []
    for name, steps in result["steps"].items():
        times = [0.0, *accumulate(sum(step[:3]) for step in steps)]
        lines.append(Line(name, times, [0.0, *accumulate(step[3] for step in steps)]))
    return Chart("Tokens over time, a mark for each target pass", "ms", "tokens", lines)


STUDY = Study(
    name="trace",
    papers="Leviathan et al. figure 5, ACL figures 17 and 19",
    title="A trace of passes over time",
    measures="Every step of one greedy text: when it ended, the passes of the target and of drafters in it, and the "
    "bytes of weights that they read. Arithmetic in use is that of the target's rows, over the matrix rate in bf16.",
    paper="Leviathan et al.: fewer passes of the target for gamma 7 than for 3, each behind as many quick ones; ACL: a "
    "draft model leaves an A100 idle while it drafts, streams do not",
    differs="two CPU cores; a draft model of a third of the target's parameters, whose passes take most of the time",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="spec_bench",
    limit=1,
    new=64,
    command="python research/study.py trace --model TARGET --draft MODEL --data DIR "
    "--out benchmarks/study-trace-DATE.json",
    whole=True,
)
