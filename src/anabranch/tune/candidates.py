"""The candidate drafters, taken from the registry, and how each is replayed from a few recordings.

Each method is recorded once, with the largest drafts of any candidate. Smaller drafts are cut from that recording, and
combined drafts are merged from the recordings of their methods (``analysis.simulate``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from anabranch.analysis.simulate import Cut, Prediction, Ranking, merged, replay
from anabranch.analysis.trace import TraceRow
from anabranch.errors import CapabilityError
from anabranch.methods import AUTO, Drafter, make_drafter, methods, parse_spec, resolve_spec
from anabranch.methods.spec import Part, Spec
from anabranch.model.decoder import Decoder
from anabranch.tune.timing import DraftTimes

__all__ = ["MOST", "PLAIN", "Candidate", "Candidates", "find_candidates"]

MOST = 32  # nodes of a draft
PLAIN = "none"


@dataclass(frozen=True)
class Candidate:
    """One drafter, and how it is replayed.

    spec      its specification
    cuts      how the drafts of each of its methods are cut from the recorded ones
    nodes     maximum number of nodes of a verified tree, counting the root
    depth     maximum depth of a draft
    adaptive  whether the verified nodes are chosen at every step
    """

    spec: Spec
    cuts: tuple[Cut, ...] = ()
    nodes: int = 1
    depth: int = 0
    adaptive: bool = False

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The names of its drafters, by which they are recorded; none for plain decoding."""
        return () if self.spec.plain else tuple(map(_name, self.spec.units))

    @property
    def group(self) -> str:
        """A name shared with candidates that differ only in size."""
        return "+".join(self.methods) or PLAIN

    def replay(self, recorded: Sequence[Sequence[TraceRow]], times: DraftTimes) -> list[Prediction]:
        """One prediction per prompt.

        recorded  one row per prompt for each method of the candidate; for plain decoding, those of any method
        """

        def price(verified: int) -> float:
            return times.step_ms(verified, self.nodes, self.depth)

        ranking = None
        if self.adaptive:
            ranking = Ranking(self.nodes, [price(n) for n in range(1, self.nodes + 1)])
        elif len(self.cuts) > 1:
            ranking = Ranking(self.nodes)
        predictions = []
        for rows in zip(*recorded, strict=True):
            if len(self.cuts) > 1:
                predictions.append(replay([merged(rows, self.cuts)], latency=price, ranking=ranking))
            else:
                cut = self.cuts[0] if self.cuts else Cut(nodes=1)
                predictions.append(replay(rows, cut, latency=price, ranking=ranking))
        return predictions


@dataclass(frozen=True)
class Candidates:
    """All candidates.

    choices   those that "auto" stands for: one, or several of which it chooses
    recorded  the drafter that is recorded, by method
    timed     the largest drafter of each group, which is timed
    """

    tried: list[Candidate]
    choices: list[Candidate]
    recorded: dict[str, Drafter]
    timed: dict[str, Drafter]


def find_candidates(target: Decoder, modules: Sequence[nn.Module | None]) -> Candidates:
    """Plain decoding, each available method by itself, those of each choice of "auto" merged, and the choices."""
    plain = parse_spec(PLAIN)
    tried, timed, recorded = [Candidate(plain)], {PLAIN: make_drafter(plain, target)}, dict[str, Drafter]()

    def add(spec: Spec, parts: Sequence[Drafter], drafter: Drafter) -> None:
        nodes = drafter.max_nodes
        sizes = [min(nodes, part.max_nodes) for part in parts]
        cuts = tuple(Cut(nodes=n, depth=part.depth_of(n)) for n, part in zip(sizes, parts, strict=True))
        tried.append(Candidate(spec, cuts, nodes, drafter.depth_of(nodes), drafter.adaptive))
        group = tried[-1].group
        if group not in timed or timed[group].max_nodes < nodes:
            timed[group] = drafter
        for unit, each in zip(spec.units, parts, strict=True):
            name = _name(unit)
            if name not in recorded or recorded[name].max_nodes < each.max_nodes:
                recorded[name] = each

    for method in methods():
        for settings in method.candidates(MOST):
            spec = Spec((Part(method, settings),))
            try:
                drafter = make_drafter(spec, target, *modules)
            except CapabilityError:
                break
            add(spec, [drafter], drafter)
    auto = resolve_spec(AUTO, *modules)
    choices = auto.choices or (auto,)
    for each in choices:
        mergers = _mergers(each.parts) if len(each.parts) > 1 else ()
        for spec in (*mergers, each):
            add(spec, _alone(spec, target, modules), make_drafter(spec, target, *modules))
    chosen = [candidate for candidate in tried if candidate.spec in choices]
    return Candidates(tried, chosen, recorded, timed)


def _mergers(together: Sequence[Part]) -> Iterator[Spec]:
    """The methods merged, with every node budget that one of them supports, and what "auto" adds to them."""
    parts = [Part(part.method, replace(part.method.settings(), **part.settings.additions)) for part in together]
    for place, part in enumerate(together):
        sized = [settings for settings in part.method.candidates(MOST) if settings.budget is not None]
        if sized:
            for settings in sized:
                chosen = Part(part.method, replace(settings, **part.settings.additions))
                yield Spec((*parts[:place], chosen, *parts[place + 1 :]))
            return
    yield Spec(tuple(parts))


def _name(unit: Spec) -> str:
    """The name of a drafter: its methods, and what is added to them."""
    return "+".join(",".join((part.method.name, *part.settings.additions)) for part in unit.parts)


def _alone(spec: Spec, target: Decoder, modules: Sequence[nn.Module | None]) -> list[Drafter]:
    return [make_drafter(unit, target, *modules) for unit in spec.units]
