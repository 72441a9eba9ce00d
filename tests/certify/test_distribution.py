"""The test of the distribution: exact drafters pass, wrong ones are found, and a test without power says so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

from anabranch import verify
from anabranch.certify import Design, SamplingCertificate, certify_sampling, html_page
from anabranch.certify.distribution import DRAFTER, TOKENS, WRONG
from anabranch.certify.draws import LENGTH, TopKAsSampled, choose_contexts, draw, sampling_scheduler, seeds
from anabranch.declared import CALL, Keywords
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.load import Target
from anabranch.model.weights import build_decoder
from anabranch.options import requests
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import LLAMA, as_target, prompt, randomise, small_adapter
from toy_distribution import assert_counts_from, next_probs

WARM_CALL: Keywords = {"temperature": 1.5, "seed": 11}
WARM = SamplingParams(temperature=1.5, seed=11)
COARSE, COARSEST = Design(effect=0.5, cells=8), Design(effect=1, cells=8)


@pytest.fixture(scope="module")
def target() -> Target:
    decoder = build_decoder(replace(LLAMA, vocab_size=8, num_layers=1), device="cpu")
    randomise(decoder, seed=3, scale=0.2)
    return as_target(decoder)


@pytest.fixture(scope="module")
def modules(target: Target) -> list[nn.Module]:
    return [small_adapter(target.decoder, StreamConfig(num_streams=2, num_stream_layers=1, adapter_rank=2))]


TEXT = [[1, 4, 2, 7, 3, 5] * 4]


def outcome(target: Target, modules: list[nn.Module], spec: str, **options: Any) -> SamplingCertificate:
    given = {name: options.pop(name) for name in {*CALL} - {"rows"} if name in options}
    asked: dict[str, Any] = {"design": COARSE, "max_new_tokens": 12, **options}
    return certify_sampling(target, modules, spec, TEXT, call={**WARM_CALL, **given}, **asked)


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("streams:tree=chain", {"rule": "rejection"}),
        ("auto", {"top_p": 0.9}),
        pytest.param("streams:tree=product,k=2", {"rule": "rejection"}, marks=pytest.mark.thorough),
        pytest.param("prompt_lookup", {"repetition_penalty": 1.3}, marks=pytest.mark.thorough),
        pytest.param("suffix", {"top_k": 4, "min_p": 0.05}, marks=pytest.mark.thorough),
    ],
)
def test_exact_drafters_are_lossless(target: Target, modules: list[nn.Module], spec: str, call: dict[str, Any]) -> None:
    lines: list[str] = []
    certificate = outcome(target, modules, spec, report=lines.append, **call)
    assert certificate.verdict == "lossless", certificate.reason
    assert certificate.samples == COARSE.samples(1)
    assert certificate.drafting.draft_nodes_per_step > 0.3, "drafted in spite of many rows"
    assert [(each.arm, each.tokens) for each in certificate.findings] == [
        (a, t) for a in (DRAFTER, WRONG) for t in TOKENS
    ]
    for each in certificate.findings:
        assert sum(cell.first for cell in each.cells) == sum(cell.second for cell in each.cells) == certificate.samples
    assert f"{certificate.samples} samples per arm after each of 1 contexts" in lines[0]
    assert json.loads(json.dumps(certificate.to_dict()))["verdict"] == "lossless"


@pytest.mark.thorough
def test_a_rule_that_accepts_every_draft_is_found(
    target: Target, modules: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "trials", lambda p_V, *_: iter([(1.0, p_V)] * 2))
    certificate = outcome(target, modules, "streams:tree=chain", rule="rejection")
    assert certificate.verdict == "BUG"
    assert "find another distribution than plain decoding's" in certificate.reason


@pytest.mark.thorough
def test_a_rule_without_the_residual_is_found(
    target: Target, modules: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A common mistake: what replaces a rejected draft is drawn from the target's distribution itself."""

    def wrong(p_V: Any, q_V: Any, siblings: Any, replacement: bool) -> Iterator[tuple[float, Any]]:
        for token in siblings:
            yield min(1.0, float(p_V[token] / q_V[token])), p_V
        yield 1.0, p_V

    monkeypatch.setattr(verify, "trials", wrong)
    certificate = outcome(target, modules, "streams:tree=product,k=2", rule="rejection", design=Design(effect=0.3))
    assert certificate.verdict == "BUG"


def test_a_test_that_misses_the_wrong_rule_is_inconclusive(
    target: Target, modules: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopKAsSampled, "draft", lambda self, rows, budget: [DraftTree.root(row.root) for row in rows])
    certificate = outcome(target, modules, "prompt_lookup", design=COARSEST)
    assert certificate.verdict == "inconclusive"
    assert "wrong rule was not noticed after 1 of 1 contexts" in certificate.reason
    assert certificate.missed == [0]


def test_a_drafter_that_proposes_nothing_is_inconclusive(target: Target) -> None:
    certificate = outcome(target, [], "none", design=COARSEST)
    assert (certificate.verdict, certificate.missed) == ("inconclusive", [])
    assert "proposed nothing" in certificate.reason


def test_samples_of_equal_seeds_are_equal_whatever_drafts(target: Target, modules: list[nn.Module]) -> None:
    """The control arm is drawn by the machinery that it controls."""
    asked: dict[str, Any] = {"rule": "match", "seeds": seeds(1, 0, 0, 40)}
    plain, steps = draw(sampling_scheduler(target, 8), NoDrafter(), TEXT[0], WARM, **asked)
    streams = make_drafter("streams", target.decoder, *modules)
    drafted, fewer = draw(sampling_scheduler(target, 8), streams, TEXT[0], WARM, **asked)
    assert plain == drafted
    assert plain.total() == 40
    assert all(len(sample) == LENGTH for sample in plain)
    assert fewer.steps < steps.steps == 40 * LENGTH


def test_the_wrong_rule_errs_by_what_it_should(target: Target) -> None:
    probs_V = next_probs(target.decoder, TEXT[0], WARM.temperature)
    drafter = TopKAsSampled(probs_V.float(), len(TEXT[0]), wrong=0.3)
    drawn, _ = draw(sampling_scheduler(target, 64), drafter, TEXT[0], WARM, rule="rejection", seeds=seeds(0, 0, 0, 600))
    wanted_V = 600 * (1 - drafter.share) * probs_V
    wanted_V[probs_V.argmax()] += 600 * drafter.share
    counts = torch.zeros(8)
    for sample, count in drawn.items():
        counts[sample[0]] += count
    assert_counts_from(counts.tolist(), (wanted_V / 600).tolist())
    assert float((wanted_V / 600 - probs_V).abs().sum() / 2) == pytest.approx(0.3, abs=1e-5)


def test_seeds_differ_between_arms_and_contexts() -> None:
    drawn = [seed for arm in range(3) for context in range(4) for seed in seeds(-5, arm, context, 100)]
    assert len(set(drawn)) == 1200
    assert seeds(7, 1, 2, 3) == seeds(7 + 2**64, 1, 2, 3)


def test_contexts_are_uncertain_and_drafted_after(target: Target) -> None:
    prompts = [prompt(20, n) for n in range(3)]
    prompts = [[token % 8 for token in each] for each in prompts]
    sharp = requests(prompts, target, {"temperature": 0.5, "seed": 2, "max_new_tokens": 16})
    contexts = choose_contexts(target, make_drafter("prompt_lookup", target.decoder), sharp)
    for context in contexts:
        assert list(context.tokens[:20]) == prompts[context.prompt]
        assert context.tokens[-1] in context.tokens[:-1], "prompt lookup needs an earlier occurrence"
        assert 0.2 < context.certainty <= 0.98


def test_failures_while_sampling_are_raised(target: Target) -> None:
    def failing(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    scheduler = sampling_scheduler(target, 1)
    with pytest.raises(ZeroDivisionError):
        draw(scheduler, NoDrafter(), [1, 2, 3], replace(WARM, processors=(failing,)), rule="match", seeds=[1])


def test_untestable_requests_are_refused(target: Target, modules: list[nn.Module]) -> None:
    for options, message in (
        ({"temperature": 0.0}, "at temperature 0 there is no distribution to test"),
        ({"rows": 0}, "rows must be a whole number of at least 1, got 0"),
        ({"temperature": 1e-4}, "nearly certain of every next token"),
    ):
        with pytest.raises(InputError, match=message):
            outcome(target, modules, "prompt_lookup", **options)
    with pytest.raises(InputError, match="at least one prompt"):
        certify_sampling(target, modules, "none", [], call=WARM_CALL)
    with pytest.raises(CapabilityError, match="use rule='match'"):
        outcome(target, modules, "prompt_lookup", rule="rejection")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"effect": 0.0}, "effect must be from 0.01 to 2, got 0.0"),
        ({"alpha": 1.0}, "alpha must be from 1e-9 to 0.5, got 1.0"),
        ({"power": 0.2}, "power must be from 0.5 to 0.9999, got 0.2"),
        ({"cells": 1}, "cells must be from 2 to 1000, got 1"),
        ({"effect": float("nan")}, "effect must be from 0.01 to 2, got nan"),
    ],
)
def test_designs_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Design(**values)


def test_more_tests_and_smaller_effects_need_more_samples() -> None:
    assert Design().samples(1) < Design().samples(6) < Design(effect=0.1).samples(6) < Design(effect=0.1).samples(60)
    assert Design(effect=0.1).samples(2) == pytest.approx(4 * Design(effect=0.2).samples(2), abs=4)


class _Page(HTMLParser):
    """Checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] += 1
        if tag != "meta":
            self.open.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href"}, "nothing is loaded from elsewhere"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(target: Target) -> None:
    certificate = outcome(target, [], "prompt_lookup", design=COARSEST)
    page = html_page(certificate, "toy <b>", lambda ids: " ".join(f"<w{i}>&" for i in ids))
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    assert parser.seen["table"] == 1 + 2 * len(certificate.contexts)
    assert parser.seen["script"] == parser.seen["b"] == parser.seen["w1"] == 0
    for text in ("lossless", "toy &lt;b&gt;", "&lt;w1&gt;&amp;", "wrong rule", f"{certificate.samples} per arm"):
        assert text in page
