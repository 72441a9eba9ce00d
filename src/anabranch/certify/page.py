"""A certificate of the distribution as one page of HTML, without scripts, fonts or pictures from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from anabranch.certify.distribution import DRAFTER, WRONG, Finding, SamplingCertificate
from anabranch.certify.statistics import Cell

__all__ = ["html_page"]

TAIL = 60  # tokens of a context that are shown
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem }
.verdict { display: inline-block; padding: .2rem .8rem; border-radius: .3rem; color: #fff; font-weight: 600 }
.lossless { background: #00704e } .BUG { background: #b3341b } .inconclusive { background: #666 }
blockquote { margin: 0; padding: .5rem 1rem; background: #f5f5f5; white-space: pre-wrap; overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .15rem .8rem .15rem 0 } th { font-weight: 600; border-bottom: 1px solid #aaa }
th:first-child, td:first-child { text-align: left } .yes { color: #b3341b; font-weight: 600 }
.bars td:first-child { font-family: ui-monospace, monospace; white-space: pre } .bars td:last-child { text-align: left }
.bar { height: .5rem; background: #0072b2 } .bar + .bar { background: #e69f00; margin-top: 1px }
""".strip()
READING = """
Every sample continues a context by three tokens. The drafter's samples and the control arm's, which plain decoding
drew with other seeds, are counted by outcome; outcomes too rare for the chi-square approximation are pooled. A small
p-value means that the two arms differ by more than chance explains. "Differs" is decided by Holm's procedure over all
tests of an arm, so that the probability of any false alarm stays below alpha. "Noise" is the total variation that two
samples of one distribution are expected to show. The wrong rule judges the three most probable tokens as if they had
been sampled, for as many samples as makes it err by twice the effect that the test must find; a test that missed it
would prove nothing.
""".strip()

Decode = Callable[[Sequence[int]], str]


def html_page(found: SamplingCertificate, target: str, decode: Decode) -> str:
    """The page.

    target  the model's name
    decode  turns token ids into text
    """
    contexts = "".join(_context(found, index, decode) for index in range(len(found.contexts)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Certificate of the distribution</title>'
        f"<style>\n{STYLE}\n</style></head><body>\n"
        f"<h1>Does {_text(found.drafter)} sample from the distribution of {_text(target)}?</h1>\n"
        f'<p><span class="verdict {found.verdict}">{found.verdict}</span> {_text(found.reason)}.</p>\n'
        f"{_facts(found)}{contexts}<h2>How to read this</h2>\n<p>{_text(READING)}</p>\n</body></html>\n"
    )


def _facts(found: SamplingCertificate) -> str:
    sampling, design, drafting = found.sampling, found.design, found.drafting
    facts = {
        "rule": found.rule,
        "sampling": f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}, "
        f"min-p {sampling.min_p:g}, repetition penalty {sampling.repetition_penalty:g}, seed {sampling.seed}",
        "samples": f"{found.samples:,} per arm after each of {len(found.contexts)} contexts",
        "finds": f"effects of w = {design.effect:g} (total variation {design.effect / 2:g}) "
        f"with power {design.power:g} at alpha {design.alpha:g}",
        "drafts": f"{drafting.draft_nodes_per_step:.2f} nodes per step, "
        f"mean acceptance length per target pass {drafting.mean_acceptance_length:.2f}",
    }
    rows = "".join(f"<tr><td>{name}</td><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{rows}</table>\n"


def _context(found: SamplingCertificate, index: int, decode: Decode) -> str:
    context = found.contexts[index]
    tests = [each for each in found.findings if each.context == index]
    first = next(each for each in tests if each.arm == DRAFTER)
    cut = "... " if len(context.tokens) > TAIL else ""
    return (
        f"<h2>Context {index + 1}, after prompt {context.prompt + 1}</h2>\n"
        f"<blockquote>{_text(cut + decode(context.tokens[-TAIL:]))}</blockquote>\n"
        f"{_tests(tests)}{_bars(first.cells, decode)}"
    )


def _tests(tests: Iterable[Finding]) -> str:
    titles = ("arm", "tokens", "cells", "chi-square", "p", "total variation", "noise", "differs")
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = []
    for each in tests:
        expected = each.arm == WRONG
        differs = f'<td class="{"" if expected else "yes"}">yes</td>' if each.rejected else "<td>no</td>"
        rows.append(
            f"<tr><td>{each.arm}</td><td>{each.tokens}</td><td>{len(each.cells)}</td>"
            f"<td>{each.test.statistic:.1f}</td><td>{each.test.p_value:.2g}</td>"
            f"<td>{each.total_variation:.4f}</td><td>{each.noise:.4f}</td>{differs}</tr>"
        )
    return f"<table><tr>{head}</tr>\n{chr(10).join(rows)}</table>\n"


def _bars(cells: Sequence[Cell], decode: Decode) -> str:
    """The frequencies of the next token in both arms, the drafter's above the control arm's."""
    size = sum(cell.first for cell in cells)
    most = max(max(cell.first, cell.second) for cell in cells)
    rows = []
    for cell in sorted(cells, key=lambda cell: -cell.second):
        name = repr(decode(cell.start)) if cell.start else "all others"
        widths = [
            f'<div class="bar" style="width:{16 * count / most:.2f}rem"></div>' for count in (cell.first, cell.second)
        ]
        rows.append(
            f"<tr><td>{_text(name)}</td><td>{cell.first / size:.4f}</td><td>{cell.second / size:.4f}</td>"
            f"<td>{''.join(widths)}</td></tr>"
        )
    head = "<tr><th>next token</th><th>drafter</th><th>control</th><th></th></tr>"
    return f'<table class="bars">{head}\n{chr(10).join(rows)}</table>\n'


def _text(text: str) -> str:
    return escape(text).replace("\x00", "")
