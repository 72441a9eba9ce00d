"""A task's result as one page of HTML, without scripts, fonts or pictures from elsewhere.

The examples are shown twice: the whole text with every token coloured by what proposed it, and one forward pass a line
with the draft tokens that it rejected, as in figures 22 and 23 of Speculative Streaming (ACL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from anabranch.bench.report import heading, tables_of
from anabranch.bench.run import Answer
from anabranch.bench.suites import Application
from anabranch.decoding.detokenizer import Detokenizer
from anabranch.support.plots import LINES

__all__ = ["task_page"]

TARGET = "target"
COLOURS = [colour for colour, _ in LINES if colour != "#000000"]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem }
h3 { font-size: 1rem; margin-bottom: .2rem } .wide { overflow-x: auto } code { overflow-wrap: anywhere }
blockquote, .text { margin: 0; padding: .5rem 1rem; background: #f7f7f7; white-space: pre-wrap;
  overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; white-space: nowrap }
caption { text-align: left; font-weight: 600 } th, td { text-align: right; padding: .15rem .8rem .15rem 0 }
th { font-weight: 600; border-bottom: 1px solid #aaa; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
.text b { font-weight: 600 } .passes { padding-left: 2.5rem; font-family: ui-monospace, monospace; font-size: .85rem }
.passes li { white-space: pre-wrap; overflow-wrap: anywhere } .before { color: #999 }
.accepted { color: #00704e; font-weight: 600 } .rejected { color: #b3341b; text-decoration: line-through }
.legend { color: #555; font-size: .9rem } .legend b { margin-right: .8rem; font-weight: 600 }
""".strip()


def task_page(
    result: Mapping[str, Any], application: Application, examples: Sequence[Mapping[str, Answer]], tokenizer: Any
) -> str:
    """The page of a result.

    examples   the answers of the first rows by contender, with their passes
    tokenizer  turns token ids into text
    """
    task = application.task
    facts = "".join(f"<p>{_text(line)}</p>\n" for line in heading(result))
    tables = "".join(f'<div class="wide">{table.html()}</div>\n' for table in tables_of(result))
    shown = "".join(_example(application, index, answers, tokenizer) for index, answers in enumerate(examples))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{_text(task.name)}</title>'
        f"<style>\n{STYLE}\n</style></head><body>\n<h1>Task {_text(task.name)}: quality and speed</h1>\n"
        f"<p><code>{_text(result['run']['command'])}</code></p>\n{facts}"
        f"<p>Prompt template:</p><blockquote>{_text(task.template.text)}</blockquote>\n"
        f"<p>Licence of the data: {_text(task.licence or 'not stated')}.</p>\n{tables}{shown}</body></html>\n"
    )


def _example(application: Application, index: int, answers: Mapping[str, Answer], tokenizer: Any) -> str:
    row = application.rows[index]
    references = "".join(f"<blockquote>{_text(text)}</blockquote>\n" for text in row.references)
    decoded = "".join(_decoded(name, answer, tokenizer) for name, answer in answers.items() if answer.passes)
    return (
        f"<h2>Example {_text(row.name)}</h2>\n<blockquote>{_text(row.prompt)}</blockquote>\n"
        f"<h3>Reference</h3>\n{references}{decoded}"
    )


def _decoded(name: str, answer: Answer, tokenizer: Any) -> str:
    """The text of a contender by what proposed each token, and its passes."""
    pieces = _pieces(answer, tokenizer)
    sources = [source for one in answer.passes for source in one.sources]
    known = [source for source in dict.fromkeys(sources) if source != TARGET]
    known.sort(key=lambda source: (len(source), source))  # "stream 2" before "stream 10"
    colours = {source: COLOURS[place % len(COLOURS)] for place, source in enumerate(known)}
    text = "".join(
        _text(piece) if source == TARGET else f'<b style="color:{colours[source]}">{_text(piece)}</b>'
        for piece, source in zip(pieces, sources, strict=True)
    )
    legend = f"<b>{TARGET} {sources.count(TARGET)}</b>" + "".join(
        f'<b style="color:{colour}">{_text(source)} {sources.count(source)}</b>' for source, colour in colours.items()
    )
    length = len(sources) / len(answer.passes)
    return (
        f"<h3>{_text(name)}: {len(sources)} tokens in {len(answer.passes)} target passes, {length:.2f} a pass</h3>\n"
        f'<div class="text">{text}</div>\n<p class="legend">Proposed by: {legend}</p>\n'
        f"{_passes(answer, pieces, tokenizer)}"
    )


def _pieces(answer: Answer, tokenizer: Any) -> list[str]:
    """The text of each token; that of an incomplete character is with the token that completes it."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token]) for one in answer.passes for token in one.tokens]
    pieces[-1] += detokenizer.finish()
    return pieces


def _passes(answer: Answer, pieces: Sequence[str], tokenizer: Any) -> str:
    lines, done = [], 0
    for one in answer.passes:
        end = done + len(one.tokens)
        rejected = tokenizer.decode(list(one.rejected), skip_special_tokens=True) if one.rejected else ""
        lines.append(
            f'<li><span class="before">{_text("".join(pieces[:done]))}</span>'
            f'<span class="accepted">{_text("".join(pieces[done:end]))}</span>'
            f'<span class="rejected">{_text(rejected)}</span></li>'
        )
        done = end
    head = "<summary>By target pass: emitted tokens in green, rejected draft tokens in red</summary>"
    return f'<details>{head}\n<ol class="passes">{chr(10).join(lines)}</ol></details>\n'


def _text(text: str) -> str:
    return escape(text).replace("\x00", "")
