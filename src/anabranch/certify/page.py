"""A certificate of the distribution as one page of HTML, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anabranch.certify.distribution import DRAFTER, WRONG, SamplingCertificate
from anabranch.certify.statistics import Cell

__all__ = ["html_page"]

TAIL = 60  # tokens of a context that are shown
WIDEST = 16  # rem, of a bar

Decode = Callable[[Sequence[int]], str]


def html_page(certificate: SamplingCertificate, target: str, decode: Decode) -> str:
    """The page; ``page.html`` is its template.

    target  the model's name
    decode  turns token ids into text
    """
    from jinja2 import Environment  # takes as long to import as a page takes to make

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    contexts = [_context(certificate, index, decode) for index in range(len(certificate.contexts))]
    page: str = (
        Environment(autoescape=True)
        .from_string(template)
        .render(certificate=certificate, target=target, facts=_facts(certificate), contexts=contexts, wrong=WRONG)
    )
    return page.replace("\x00", "") + "\n"


def _facts(certificate: SamplingCertificate) -> dict[str, str]:
    sampling, design, drafting = certificate.sampling, certificate.design, certificate.drafting
    return {
        "rule": certificate.rule,
        "sampling": f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}, "
        f"min-p {sampling.min_p:g}, repetition penalty {sampling.repetition_penalty:g}, seed {sampling.seed}",
        "samples": f"{certificate.samples:,} per arm after each of {len(certificate.contexts)} contexts",
        "finds": f"effects of w = {design.effect:g} (total variation {design.effect / 2:g}) "
        f"with power {design.power:g} at alpha {design.alpha:g}",
        "drafts": f"{drafting.draft_nodes_per_step:.2f} nodes per step, "
        f"mean acceptance length per target pass {drafting.mean_acceptance_length:.2f}",
    }


def _context(certificate: SamplingCertificate, index: int, decode: Decode) -> dict[str, Any]:
    """The end of a context's text, its tests, and the frequencies of the next token in both arms."""
    context = certificate.contexts[index]
    tests = [each for each in certificate.findings if each.context == index]
    cut = "... " if len(context.tokens) > TAIL else ""
    cells = next(each for each in tests if each.arm == DRAFTER).cells
    return {
        "prompt": context.prompt + 1,
        "text": cut + decode(context.tokens[-TAIL:]),
        "tests": tests,
        "cells": list(_bars(cells, decode)),
    }


def _bars(cells: Sequence[Cell], decode: Decode) -> list[tuple[str, float, float, list[float]]]:
    """The name of each cell, its share in the drafter's and in the control arm, and the widths of both bars."""
    size = sum(cell.first for cell in cells)
    most = max(max(cell.first, cell.second) for cell in cells)
    return [
        (
            repr(decode(cell.start)) if cell.start else "all others",
            cell.first / size,
            cell.second / size,
            [WIDEST * count / most for count in (cell.first, cell.second)],
        )
        for cell in sorted(cells, key=lambda cell: -cell.second)
    ]
