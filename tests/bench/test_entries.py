"""Contenders as written: lists with commas inside settings and paths, kinds of weights, and paths in results."""

from __future__ import annotations

import pytest

from anabranch.bench.entries import listed, quantised, read_entries
from anabranch.support.files import without_folders


@pytest.mark.parametrize(
    ("text", "contenders"),
    [
        ("auto,fast=suffix:nodes=8,tree=auto,none", ["auto", "fast=suffix:nodes=8,tree=auto", "none"]),
        ("streams:tree=8,prune=4,suffix@int8,x=auto", ["streams:tree=8,prune=4", "suffix@int8", "x=auto"]),
        ("rest:data=/a,b,auto", ["rest:data=/a,b", "auto"]),
        ('rest:data="/a,auto",auto', ['rest:data="/a,auto"', "auto"]),
        ("rest:data=/a@b,c,q=suffix+rest", ["rest:data=/a@b,c", "q=suffix+rest"]),
        ("auto,sufix", ["auto", "sufix"]),
    ],
)
def test_commas_of_settings_and_paths_separate_no_contenders(text: str, contenders: list[str]) -> None:
    assert listed(text) == contenders


def test_an_at_sign_in_a_path_names_no_weights() -> None:
    entries = {entry.spec: entry for entry in read_entries(["rest:data=/a@b/c", "suffix@int8"], [])}
    assert (entries["rest:data=/a@b/c"].weights, entries["suffix"].weights) == ("none", "int8")
    assert [quantised(text, "int4") for text in ("suffix@int8", "rest:data=/a@b/c")] == [
        "suffix@int8",
        "rest:data=/a@b/c@int4",
    ]


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("/home/me/x,y", "x,y"),
        ("a=rest:data=/home/me/a,b,nodes=8+suffix", "a=rest:data=a,b,nodes=8+suffix"),
        ('draft_model:model="/home/me/c,d+e",tokens=3', 'draft_model:model="c,d+e",tokens=3'),
        ("rest:data='/home/me/c'+ngram:data=/home/me/d", "rest:data='c'+ngram:data=d"),
        ("--out=/home/me/f", "--out=f"),
        ("streams:tree=8", "streams:tree=8"),
    ],
)
def test_results_have_no_folders_whatever_a_path_contains(text: str, shared: str) -> None:
    assert without_folders(text) == shared
