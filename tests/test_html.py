"""Results in notebooks."""

from __future__ import annotations

import html
import pickle
import re

from anabranch.decoding.generation import coloured
from toy_text import toy_model


def text_of(page: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", page.partition("</div>")[0]))


def test_tokens_are_coloured_by_what_proposed_them() -> None:
    model = toy_model()
    for options in ({}, {"temperature": 1.5, "seed": 3}, {"stop": ["e"], "temperature": 1.5, "seed": 2}):
        found = model.generate("the thing the thing", max_new_tokens=24, drafter="suffix", **options)
        page = found._repr_html_()
        assert text_of(page) == found.text
        drafted = sum(source != "target" for source in found.sources)
        assert page.count("<span") >= (drafted > 0)
        *_, chunk = model.stream("the thing the thing", max_new_tokens=24, drafter="suffix", **options)
        assert text_of(chunk.result._repr_html_()) == found.text
        copied = pickle.loads(pickle.dumps(found))
        assert copied == found
        assert text_of(copied._repr_html_()) == found.text
        assert "_tokenizer" not in vars(copied)


def test_text_is_escaped_and_the_legend_counts() -> None:
    page = coloured("<b>a&b", ["<b>", "a&", "b"], ["target", "stream 1", "stream 2"], "2.5 tokens, drafter <x>")
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "drafter &lt;x&gt;" in page
    assert page.count('title="stream 1"') == 2  # the token and the legend
    assert "target 1" in page
