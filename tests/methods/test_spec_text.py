"""Specifications with paths: commas, plus signs and quotes in them, and printing back."""

from __future__ import annotations

import pytest

from anabranch.drafting.settings import pieces, quoted, unquoted
from anabranch.errors import InputError
from anabranch.methods import parse_spec


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rest:data=/a+b,c.db", [("rest", "data", "/a+b,c.db")]),
        ("rest:data=/a,b,c,nodes=8", [("rest", "data", "/a,b,c"), ("rest", "nodes", 8)]),
        ("rest:nodes=8,data=/a+b+c", [("rest", "nodes", 8), ("rest", "data", "/a+b+c")]),
        ("rest:data=/a+b,c+suffix", [("rest", "data", "/a+b,c"), ("suffix", "nodes", "16")]),
        ("suffix+rest:data=/a+b", [("suffix", "nodes", "16"), ("rest", "data", "/a+b")]),
        ("rest:data=/a,b=c", [("rest", "data", "/a,b=c")]),
        ('rest:data="/a+suffix,nodes=3"', [("rest", "data", "/a+suffix,nodes=3"), ("rest", "nodes", 16)]),
        ("rest:data='/a\"b,nodes=3',nodes=4", [("rest", "data", '/a"b,nodes=3'), ("rest", "nodes", 4)]),
        (r'rest:data="/a\"b\\c"', [("rest", "data", r"/a\"b\c".replace('\\"', '"'))]),
        ("draft_model:model=/m,1+2,tokens=3", [("draft_model", "model", "/m,1+2"), ("draft_model", "tokens", "3")]),
        ("staged:model=/m+n,x;y,inner=suffix", [("staged", "model", "/m+n,x;y"), ("staged", "inner", "suffix")]),
        ("ngram:data=a b,c", [("ngram", "data", "a b,c")]),
    ],
)
def test_a_path_may_have_commas_and_plus_signs_and_is_printed_so_that_it_reads_back(
    text: str, parts: list[tuple[str, str, object]]
) -> None:
    spec = parse_spec(text)
    for method, name, value in parts:
        part = next(part for part in spec.parts if part.method.name == method)
        assert getattr(part.settings, name) == value
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sufix", "there is no drafter 'sufix' (did you mean 'suffix'?)"),
        ("suffix+promt_lookup", "there is no drafter 'promt_lookup' (did you mean 'prompt_lookup'?)"),
        ("streams:tree=8+promt_lookup", "there is no drafter 'promt_lookup'"),
        ("streams:tre=8", "has no setting 'tre=8' (did you mean 'tree'?)"),
        ("prompt_lookup:tokens=4,ngrams=2", "has no setting 'ngrams=2' (did you mean 'ngram'?)"),
        ("prompt_lookup:tokens=4,rubbish", "has no setting 'rubbish'; settings are"),
        ('rest:data="/a,b', "starts with a quote that does not end it"),
        ("suffix++rest", "there is no drafter ''; drafters are"),
        ("rest:data=/a,nodes=1", "nodes must be at least 2"),
    ],
)
def test_what_is_no_path_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_spec(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "value", ["", "plain", "/a b", 'quo"te', "back\\slash", "both\\\",'", "a+b", ",", "x@y", "a=b"]
)
def test_quoting_round_trips(value: str) -> None:
    assert unquoted(quoted(value), "it") == value
    assert pieces(f"a={quoted(value)},b=2", ",") == [f"a={quoted(value)}", "b=2"]
