"""Test whether speculative decoding samples from the target's distribution.

After some contexts, many independent samples of three tokens are drawn with the drafter, and as many by plain decoding
with other seeds: the control arm, from the same scheduler, model and sampling parameters. Chi-square tests compare the
next token, and the joint distributions of tokens 1 and 2 and of tokens 2 and 3 (some drafters draft nothing in the
first step). Holm's procedure keeps the probability of any false alarm below ``alpha``, and the number of samples
follows from the smallest difference that must be found.

A third arm is wrong on purpose (``TopKAsSampled``), by an effect of about twice the smallest one, and must be found
after every context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from anabranch.certify.draws import Context, TopKAsSampled, choose_contexts, draw, sampling_scheduler, seeds
from anabranch.certify.statistics import (
    Cell,
    ChiSquare,
    holm,
    homogeneity,
    noise_of,
    pooled,
    samples_needed,
    total_variation,
)
from anabranch.declared import Keywords
from anabranch.decoding.stats import Stats
from anabranch.errors import InputError
from anabranch.methods import Drafter, Spec, make_drafter
from anabranch.model.load import Target
from anabranch.options import requests
from anabranch.sampling import SamplingParams
from anabranch.verify import Rule

__all__ = ["CONTROL", "DRAFTER", "TOKENS", "WRONG", "Design", "Finding", "SamplingCertificate", "certify_sampling"]

DRAFTER, CONTROL, WRONG = "drafter", "control", "wrong rule"
ARMS = (DRAFTER, CONTROL, WRONG)
LEFT_OUT = ("processors", "constraint")  # parameters of sampling that are no JSON
TOKENS = {"1": slice(0, 1), "1-2": slice(0, 2), "2-3": slice(1, 3)}  # of a sample that one test compares
Verdict = Literal["lossless", "BUG", "inconclusive"]
Samples = Counter[tuple[int, ...]]


@dataclass(frozen=True)
class Design:
    """The sensitivity of the tests.

    effect  the smallest difference that matters, as Cohen's w; every difference of a total variation of w / 2 over
            the cells counts
    alpha   the probability of a false alarm in any of the tests, at most
    power   the probability of finding a difference of that size in a test, at least
    cells   of a test, at most; rarer outcomes are pooled

    Raises InputError for values out of range.
    """

    effect: float = 0.2
    alpha: float = 0.01
    power: float = 0.95
    cells: int = 16

    def __post_init__(self) -> None:
        if not 0.01 <= self.effect <= 2:
            raise InputError(f"effect must be from 0.01 to 2, got {self.effect}")
        if not 1e-9 <= self.alpha <= 0.5:
            raise InputError(f"alpha must be from 1e-9 to 0.5, got {self.alpha}")
        if not 0.5 <= self.power <= 0.9999:
            raise InputError(f"power must be from 0.5 to 0.9999, got {self.power}")
        if not 2 <= self.cells <= 1000:
            raise InputError(f"cells must be from 2 to 1000, got {self.cells}")

    def samples(self, contexts: int) -> int:
        """Samples to draw after each of so many contexts, in each arm.

        Tests are planned at ``alpha`` divided by their number (Bonferroni), so Holm's procedure has more power.
        """
        alpha = self.alpha / (len(TOKENS) * contexts)
        return samples_needed(self.effect, degrees=self.cells - 1, alpha=alpha, power=self.power)


@dataclass(frozen=True)
class Finding:
    """One test of one arm against the control arm.

    context          index in ``SamplingCertificate.contexts``
    arm              ``DRAFTER`` or ``WRONG``
    tokens           which tokens of the samples it compares, a key of ``TOKENS``
    cells            their counts, ``first`` in this arm and ``second`` in the control arm
    total_variation  between the two arms' frequencies
    noise            the total variation that two samples of one distribution are expected to have
    rejected         whether the arms differ, by Holm's procedure over all tests of this arm
    """

    context: int
    arm: str
    tokens: str
    cells: tuple[Cell, ...]
    test: ChiSquare
    total_variation: float
    noise: float
    rejected: bool


@dataclass(frozen=True)
class SamplingCertificate:
    """The result: what was tested, every test, and the verdict.

    samples   drawn after each context in each arm
    drafting  statistics of the drafter's arm
    """

    drafter: str
    rule: Rule
    sampling: SamplingParams
    design: Design
    samples: int
    contexts: tuple[Context, ...]
    findings: tuple[Finding, ...]
    drafting: Stats

    @property
    def missed(self) -> list[int]:
        """The contexts after which the wrong rule was not found."""
        sampled = {each.context for each in self.findings if each.arm == WRONG and each.rejected}
        return [index for index in range(len(self.contexts)) if index not in sampled]

    @property
    def verdict(self) -> Verdict:
        """ "BUG" if a test of the drafter rejects; "inconclusive" if the tests could not have found one."""
        if any(each.rejected for each in self.findings if each.arm == DRAFTER):
            return "BUG"
        return "inconclusive" if self.missed or not self.drafting.draft_nodes else "lossless"

    @property
    def reason(self) -> str:
        """The verdict in a sentence."""
        tests = [each for each in self.findings if each.arm == DRAFTER]
        rejected = [each for each in tests if each.rejected]
        if rejected:
            return f"{len(rejected)} of {len(tests)} tests find another distribution than plain decoding's"
        if self.missed:
            return (
                f"the deliberately wrong rule was not noticed after {len(self.missed)} of {len(self.contexts)} "
                "contexts; raise the temperature or lower the effect"
            )
        if not self.drafting.draft_nodes:
            return "the drafter proposed nothing after these contexts; choose other prompts"
        return f"none of {len(tests)} tests finds a difference, and the deliberately wrong rule was found each time"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        sampling = {name: value for name, value in vars(self.sampling).items() if name not in LEFT_OUT}
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "drafter": self.drafter,
            "rule": self.rule,
            "sampling": sampling,
            "design": vars(self.design),
            "samples": self.samples,
            "contexts": [vars(context) for context in self.contexts],
            "tests": [
                {
                    **{name: value for name, value in vars(each).items() if name not in ("cells", "test")},
                    **vars(each.test),
                    "cells": [vars(cell) for cell in each.cells],
                }
                for each in self.findings
            ],
            "drafting": self.drafting.to_dict(),
        }


def certify_sampling(
    target: Target,
    modules: Sequence[nn.Module | None],
    spec: str | Spec,
    prompts: Sequence[Sequence[int]],
    *,
    call: Keywords,
    design: Design | None = None,
    max_new_tokens: int = 64,
    rows: int = 32,
    report: Callable[[str], None] = lambda line: None,
) -> SamplingCertificate:
    """Test the distribution of what the drafter ``spec`` decodes after one context of each prompt.

    modules         the modules trained for the target, as for ``make_drafter``
    call            options of decoding: a temperature above 0, the seed of the whole test, the rule. Those left out are
                    the defaults of the model's generation config
    max_new_tokens  contexts end within so many sampled tokens after their prompt
    rows            samples that are decoded at a time
    report          called with lines of progress

    Raises InputError where there is nothing to test, and what ``make_drafter`` and ``Scheduler.submit`` raise.
    """
    if not prompts:
        raise InputError("there is nothing to certify; give at least one prompt")
    if not call.get("temperature"):
        raise InputError("at temperature 0 there is no distribution to test; give a temperature above 0")
    design = design or Design()
    drafter = make_drafter(spec, target.decoder, *modules)
    batch = requests(prompts, target, {**call, "max_new_tokens": max_new_tokens, "rows": rows})
    contexts = choose_contexts(target, drafter, batch)
    samples = design.samples(len(contexts))
    report(
        f"{samples:,} samples per arm after each of {len(contexts)} contexts find effects of w = {design.effect:g} "
        f"(total variation {design.effect / 2:g}) with power {design.power:g} at alpha {design.alpha:g} over "
        f"{len(TOKENS) * len(contexts)} tests"
    )
    tests: list[Finding] = []
    stats, scheduler = [], sampling_scheduler(target, rows)

    def one(arm: str, drafter: Drafter, index: int, rule: Rule) -> tuple[Samples, Stats]:
        request, text = batch[contexts[index].prompt], contexts[index].tokens
        drawn = seeds(request.sampling.seed, ARMS.index(arm), index, samples)
        return draw(scheduler, drafter, text, request.sampling, rule=rule, seeds=drawn, source=request.source)

    for index, context in enumerate(contexts):
        control, _ = one(CONTROL, make_drafter("none", target.decoder), index, "match")
        drafted, drafting = one(DRAFTER, drafter, index, batch[0].rule)
        wrong, _ = one(WRONG, _wrong(target, control, context, design), index, "rejection")
        stats.append(drafting)
        for arm, sampled in ((DRAFTER, drafted), (WRONG, wrong)):
            tests += _tests(index, arm, sampled, control, design)
            report(f"context {index + 1} of {len(contexts)}, {arm}: {_shown(tests[-len(TOKENS) :])}")
    merged = Stats.merged(stats)
    findings = _judged(tests, design.alpha)
    return SamplingCertificate(
        *(str(spec), batch[0].rule, batch[0].sampling, design, samples, tuple(contexts), findings, merged)
    )


def _wrong(target: Target, control: Samples, context: Context, design: Design) -> Drafter:
    """Errs by a total variation of ``effect``, and so by an effect of at least twice that."""
    probs_V = torch.zeros(target.config.vocab_size, device=target.decoder.device)
    for sample, count in control.items():
        probs_V[sample[0]] += count
    return TopKAsSampled(probs_V / probs_V.sum(), len(context.tokens), wrong=design.effect)


def _tests(context: int, arm: str, sampled: Samples, control: Samples, design: Design) -> list[Finding]:
    """All tests of an arm after one context; which of them reject is said later."""
    tests = []
    for tokens, part in TOKENS.items():
        cells = pooled(_part(sampled, part), _part(control, part), design.cells)
        test = homogeneity(cells)
        tests.append(
            Finding(context, arm, tokens, tuple(cells), test, total_variation(cells), noise_of(cells), rejected=False)
        )
    return tests


def _part(samples: Samples, part: slice) -> Samples:
    counts: Samples = Counter()
    for sample, count in samples.items():
        counts[sample[part]] += count
    return counts


def _judged(tests: Sequence[Finding], alpha: float) -> tuple[Finding, ...]:
    """The tests with what Holm's procedure says of each arm's."""
    judged: dict[int, bool] = {}
    for arm in (DRAFTER, WRONG):
        places = [place for place, each in enumerate(tests) if each.arm == arm]
        judged |= dict(zip(places, holm([tests[place].test.p_value for place in places], alpha), strict=True))
    return tuple(replace(each, rejected=judged[place]) for place, each in enumerate(tests))


def _shown(tests: Sequence[Finding]) -> str:
    return ", ".join(f"tokens {each.tokens} p = {each.test.p_value:.2g}" for each in tests)
