"""Measurements of a comparison of methods: acceptance, the cost of a step, speed, and exactness.

Acceptance is counted from real decoding: it is as cheap as a replay of recorded drafts, and its steps are timed too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from anabranch.bench.entries import PLAIN, Entry, open_entry
from anabranch.bench.run import Contender, Encoded, Load, Ours, Outcome, Prompts, one_by_one, rounds, warm_up
from anabranch.bench.suites import SuitePrompt
from anabranch.bench.summary import gather, summarise, summarise_rows
from anabranch.certify import certify
from anabranch.loading import Loaded
from anabranch.methods import Drafter, Spec, make_drafter, parse_spec
from anabranch.options import Keywords
from anabranch.support.files import without_folders

__all__ = ["certificate", "one_row", "several_rows", "step_costs"]

Records = list[dict[str, Any]]
Report = Callable[[str], None]
LEFT_OUT = ("accepted_per_step", "token_ms_by_part", "sources")


def one_row(
    loaded: Loaded,
    specs: Mapping[str, Spec],
    prompts: Sequence[Encoded],
    warm: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Keywords | None = None,
    rejection: Collection[str] = (),
    report: Report = lambda what: None,
) -> Records:
    """Decode every prompt plainly and with each drafter in turn, one at a time; one record per drafter, plain first.

    The records are those of ``bench.summary``, with ``step_costs`` and the drafter's specification. Every drafter
    decodes a prompt once, so that none can have seen its continuation.

    specs      drafters by label
    warm       a prompt that is not among those measured, for warming up
    sampling   options of ``Model.generate``, such as temperature
    rejection  the drafters whose drafts are verified by *rejection*, the others' by matching
    """
    capacity = max(len(warm), *(len(ids) for _, ids in prompts)) + max_new_tokens
    entries = {PLAIN: Entry(PLAIN, PLAIN)} | {name: Entry(name, str(spec)) for name, spec in specs.items()}
    opened: dict[str, Contender] = {
        name: open_entry(
            entry,
            loaded,
            call={**(sampling or {}), "rule": "rejection" if name in rejection else "match"},
            threads=torch.get_num_threads(),
            capacity=capacity,
        )
        for name, entry in entries.items()
    }
    _, errors = warm_up(opened, one_by_one([(prompts[0][0], warm)]), max_new_tokens=max_new_tokens)
    usable = {name: contender for name, contender in opened.items() if name not in errors}
    done = list(
        rounds(
            usable,
            one_by_one(prompts),
            max_new_tokens=max_new_tokens,
            report=lambda now, total, what: report(f"prompt {now + 1}/{total}: {what}") if what else None,
        )
    )
    found = gather(list(opened), done, errors)
    # with rejection, a sampled text depends on the drafts
    records = summarise(found, prompts, baseline=lambda name: PLAIN, comparable=lambda name: name not in rejection)
    plain = records[0]
    for record in records:
        record["spec"] = without_folders(entries[record["name"]].spec)
        if "error" not in record and "error" not in plain:
            record |= step_costs(record, plain)
        for name in LEFT_OUT:
            record.pop(name, None)
    return records


def step_costs(record: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of a step by part, and its shares of a step of plain decoding on the same prompts.

    draft_ms                                 of drafting, and of preparing drafts after the pass
    pass_ms                                  of the target's pass
    draft_share, pass_share, relative_step   the same, and the whole step, divided by a plain step
    """
    parts, base = record["step_ms_by_part"], plain["step_ms_by_part"]
    whole = sum(base.values())
    draft = parts["draft"] + max(0.0, parts["prepare"] - base["prepare"])
    found = {
        "draft_ms": round(draft, 4),
        "pass_ms": round(parts["forward"], 4),
        "draft_share": round(draft / whole, 4),
        "pass_share": round(parts["forward"] / whole, 4),
    }
    mine, plainly = record["step_ms_quartiles"], plain["step_ms_quartiles"]
    return found if mine is None or plainly is None else found | {"relative_step": round(mine[1] / plainly[1], 4)}


class _Forgetting:
    """A contender whose drafter is built anew for every call: one that learns from texts does not know the prompts."""

    def __init__(self, ours: Ours, build: Callable[[], Drafter]) -> None:
        self.ours, self.build = ours, build

    def serve(self, prompts: Prompts, *, rows: int, max_new_tokens: int) -> Outcome:
        """As ``Ours.serve``, with a new drafter."""
        self.ours.drafter = self.build()
        return self.ours.serve(prompts, rows=rows, max_new_tokens=max_new_tokens)


def several_rows(
    loaded: Loaded,
    specs: Mapping[str, Spec],
    prompts: Prompts,
    *,
    rows: int,
    max_new_tokens: int,
    repeats: int,
    report: Report = lambda what: None,
) -> Records:
    """Greedy throughput of ``rows`` rows at a time, plainly and with each drafter in turn (``bench load``)."""
    capacity = max(map(len, prompts)) + max_new_tokens
    contenders: dict[str, Contender] = {}
    for name, spec in {PLAIN: parse_spec(PLAIN), **specs}.items():
        ours = open_entry(
            *(Entry(name, str(spec)), loaded),
            call={},
            threads=torch.get_num_threads(),
            capacity=capacity,
        )
        assert isinstance(ours, Ours)
        build = partial(make_drafter, spec, loaded.target.decoder, *loaded.modules)
        contenders[name] = _Forgetting(ours, build)
    load = Load(tuple((SuitePrompt(str(place), "prompts", ""), ids) for place, ids in enumerate(prompts)), rows)
    _, errors = warm_up(contenders, [load], max_new_tokens=max_new_tokens)
    done = list(
        rounds(
            {name: contender for name, contender in contenders.items() if name not in errors},
            [load] * repeats,
            max_new_tokens=max_new_tokens,
            report=lambda now, total, what: report(f"round {now + 1}/{total}: {what}") if what else None,
        )
    )
    records = summarise_rows(done, dict.fromkeys(contenders, PLAIN), errors=errors)
    return [record | {"spec": without_folders(str(specs.get(record["name"], PLAIN)))} for record in records]


def certificate(
    loaded: Loaded,
    spec: Spec,
    prompts: Prompts,
    *,
    rows: Sequence[int],
    max_new_tokens: int,
    report: Report = lambda what: None,
) -> dict[str, Any]:
    """Compare greedy tokens with plain decoding's by ``anabranch.certify``, at each number of rows.

    The verdict is "equal" if every prompt's tokens are equal, else "tie", or "BUG" if any prompt's is.
    """
    counts: dict[str, dict[str, int]] = {}
    for number in rows:
        report(f"certifying, rows: {number}")
        found = certify(loaded.target, loaded.modules, spec, prompts, max_new_tokens=max_new_tokens, rows=number)
        verdicts = [each.verdict for each in found]
        counts[str(number)] = {verdict: verdicts.count(verdict) for verdict in ("equal", "tie", "BUG")}
    worst = [verdict for verdict in ("BUG", "tie") if any(count[verdict] for count in counts.values())]
    return {
        "verdict": worst[0] if worst else "equal",
        "spec": without_folders(str(spec)),
        "dtype": str(loaded.target.decoder.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "rows": counts,
    }
