"""What a step costs by the nodes that it verifies and by the nodes that it drafts, measured as the engine steps.

A step is timed from its call until it returns, so whatever the engine does in it counts: draft, pass, verification,
commit, trailing streams, and Python between them. The real drafters are in place, since what they do to threads and
caches is part of a step too.

    a step that verifies n nodes of a draft of m  =  rest(n) + draft(m)

``rest`` is measured with one wide draft that is cut to each width, and ``draft``, which includes the streams that trail
the pass, with drafts of several sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.analysis.simulate import Latency
from anabranch.bench.shapes import Fixed
from anabranch.costs import disturbed
from anabranch.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.methods import Context, Drafter, make_drafter
from anabranch.methods.base import Wrapped
from anabranch.methods.combined import CombinedDrafter
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.model.load import Target
from anabranch.tree import DraftTree

__all__ = ["DRAFTS", "WIDTHS", "Measured", "measure_steps"]

WIDTHS = (1, 2, 4, 6, 8, 9, 12, 16, 17, 20, 24, 25, 32)  # both sides of where a read of the weights ends
DRAFTS = (4, 6, 8, 16, 32)  # nodes drafted
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """Mean milliseconds of a step without its draft by nodes verified, and of drafts by nodes drafted.

    rest     "none": with nothing else; "streams": with the streams that ride
    drafts   "none", "prompt_lookup", "streams", and "merged": those of both, merged; with the streams that trail
    busy     other jobs disturbed the steps
    """

    rest: dict[str, Latency]
    drafts: dict[str, Latency]
    busy: bool = False

    def table(self, method: str, nodes: int | None = None, *, merged: bool = False) -> Latency:
        """Whole steps of a method whose streams draft ``nodes`` nodes, by the nodes that are verified."""
        rest = self.rest["streams" if method.startswith("streams") else "none"]
        draft = self.drafts["merged" if merged else method]
        more = float(np.interp(nodes or 1, draft.widths, draft.ms))
        return Latency(rest.widths, tuple(ms + more for ms in rest.ms))


class _Narrow(Wrapped):
    """A drafter whose trees are cut to ``width`` nodes."""

    def __init__(self, drafter: Drafter, width: int) -> None:
        super().__init__(drafter)
        self.width = width

    def draft(self, contexts: Sequence[Context]) -> list[DraftTree]:
        return [tree.truncate(self.width) for tree in self.drafter.draft(contexts)]


@dataclass
class _Timed:
    """An engine under measurement.

    nodes        those that a step must verify to count; None: any
    rest, draft  milliseconds of the counted steps: the pass with its verification, and drafting, trailing streams too
    """

    engine: Engine
    nodes: int | None
    rest: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)

    def run(self, request: Request, steps: int) -> None:
        """Take ``steps`` counted steps; the first one after others have decoded is not."""
        counted = -1
        while counted < steps:
            if not self.engine.active:
                self.engine.add(request)
                self.engine.step()  # the first step of a text knows no draft
            began = time.perf_counter()
            (step,) = self.engine.step()
            whole = 1e3 * (time.perf_counter() - began)
            counted += 1
            # near the end of the text trees are cut
            if counted and (self.nodes is None or step.tree.size == self.nodes):
                draft = 1e3 * (step.timings.draft + step.timings.commit)
                self.rest.append(whole - draft)
                self.draft.append(draft)


def measure_steps(
    target: Target,
    adapter: StreamAdapter | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 96,
    rounds: int = 6,
    steps: int = 4,
    report: Report = lambda what, done, total: None,
) -> Measured:
    """Step times behind ``prompt``, all kinds in turns, so that a machine that drifts drifts for all.

    One more round goes before the counted ones.

    Medians by kind, times what the mean of steps of one width is over their median: a sum of steps is to be predicted,
    and it holds the slow ones too.
    """
    if rounds < 2 or steps < 1:
        raise InputError("measuring steps takes at least 2 rounds, and 1 step a round")
    kinds: dict[tuple[str, str, int], tuple[Drafter, int | None]] = {("rest", "none", n): (Fixed(n), n) for n in WIDTHS}
    kinds["draft", "none", 1] = (NoDrafter(), None)
    kinds["draft", "prompt_lookup", 1] = (make_drafter("prompt_lookup", target.decoder), None)
    if adapter is not None:
        widest = make_drafter(f"streams:tree={DRAFTS[-1]}", target.decoder, adapter)
        kinds |= {("rest", "streams", n): (_Narrow(widest, n), n) for n in WIDTHS}
        for n in DRAFTS:
            streams = make_drafter(f"streams:tree={n}", target.decoder, adapter)
            both = [streams, make_drafter("prompt_lookup", target.decoder)]
            kinds["draft", "streams", n] = (streams, None)
            kinds["draft", "merged", n] = (CombinedDrafter(both, nodes=n), None)
    request = Request(prompt, min(max(max_new_tokens, 2 * WIDTHS[-1]), target.config.max_positions - len(prompt)))
    capacity = len(prompt) + request.max_new_tokens
    timed = {
        kind: _Timed(Engine(target.decoder, drafter, capacity=capacity), nodes)
        for kind, (drafter, nodes) in kinds.items()
    }
    for done in range(rounds + 1):
        report("step times", done, rounds + 1)
        for one in timed.values():
            if done == 0:
                one.engine.rehearse(request)
            one.run(request, steps)
            if done == 0:  # memory is touched for the first time
                one.rest.clear()
                one.draft.clear()
    samples = [one.rest for one in timed.values() if one.rest and one.nodes is not None]  # alike but for noise
    slow = sum(map(sum, samples)) / sum(len(found) * statistics.median(found) for found in samples)

    def table(what: str, method: str) -> Latency:
        found = {n: getattr(one, what) for (w, m, n), one in timed.items() if (w, m) == (what, method)}
        known = [n for n in sorted(found) if found[n]]
        # more nodes cost no less: what noise says otherwise is levelled
        rising = np.maximum.accumulate([slow * statistics.median(found[n]) for n in known])
        return Latency(tuple(known), tuple(float(ms) for ms in rising))

    return Measured(
        {method: table("rest", method) for method in dict.fromkeys(m for what, m, _ in timed if what == "rest")},
        {method: table("draft", method) for method in dict.fromkeys(m for what, m, _ in timed if what == "draft")},
        busy=disturbed(timed["rest", "none", 1].rest),
    )
