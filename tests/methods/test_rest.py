"""The suffix array against brute force, and what the drafter makes of its matches."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.drafting.drafter import Row
from anabranch.errors import InputError
from anabranch.methods.rest import suffixes
from anabranch.methods.rest.entry import Datastore, RestDrafter, RestSettings
from anabranch.methods.rest.suffixes import WIDTH
from anabranch.sampling import SamplingParams
from toy_tables import opened, write

WORDS = 4
documents = st.lists(st.lists(st.integers(0, WORDS - 1), max_size=40), min_size=1, max_size=5).filter(any)


def store(texts: Sequence[Sequence[int]], vocab_size: int = WORDS, **options: int) -> Datastore:
    with tempfile.TemporaryDirectory() as home:  # what is mapped outlives its name
        write("rest", texts, Path(home) / "tables", vocab_size=vocab_size, **options)
        return Datastore(opened("rest", Path(home) / "tables", vocab_size))


def ordered(texts: Sequence[Sequence[int]], vocab_size: int = WORDS) -> tuple[list[int], list[int]]:
    """The text with separators, and the places of its suffixes in order."""
    whole = [token for text in texts if text for token in (*text, vocab_size)]
    padded = whole + [vocab_size] * WIDTH
    places = [place for place in range(len(whole)) if whole[place] != vocab_size]
    return whole, sorted(places, key=lambda place: (padded[place : place + WIDTH], place))


def arrays(found: Datastore) -> tuple[list[int], list[int]]:
    return found._text.tolist(), found._places.tolist()


@settings(max_examples=30, deadline=None)
@given(documents)
def test_suffixes_are_in_order(texts: list[list[int]]) -> None:
    assert arrays(store(texts)) == ordered(texts)


@pytest.mark.parametrize("vocab_size", [19, 70_000, 3_000_000])
def test_any_vocabulary(vocab_size: int) -> None:
    random = np.random.default_rng(0)
    base = random.integers(vocab_size, size=6)
    texts = [random.choice(base, size=50).tolist() for _ in range(4)]
    assert arrays(store(texts, vocab_size)) == ordered(texts, vocab_size)


@pytest.mark.parametrize("case", ["random", "one token", "one text again and again"])
def test_groups_that_fit_in_memory_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    texts = {
        "random": [(random.zipf(1.6, size=90) % WORDS).tolist() for _ in range(40)],
        "one token": [[2] * 3000],
        "one text again and again": [[0, 1, 2, 3, 3, 1]] * 500,
    }[case]
    monkeypatch.setattr(suffixes, "READ", 301)
    monkeypatch.setattr(suffixes, "BYTES_A_SUFFIX", 1 << 20)
    sizes = []
    real = suffixes._sorted
    monkeypatch.setattr(suffixes, "_sorted", lambda text, places: sizes.append(len(places)) or real(text, places))
    assert arrays(store(texts, memory=1)) == ordered(texts)
    assert len(sizes) > 1
    assert max(sizes) <= 1024


@settings(max_examples=30, deadline=None)
@given(documents, st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=8))
def test_the_longest_match_is_found(texts: list[list[int]], context: list[int]) -> None:
    found = store(texts)
    most = 6
    wanted = 0
    for n in range(1, min(most, len(context)) + 1):
        if any(text[i : i + n] == context[-n:] for text in texts for i in range(len(text))):
            wanted = n
    length, low, high = found.longest(context, most)
    assert length == wanted
    ends = sorted(
        text[i + length : i + length + 3]
        for text in texts
        for i in range(len(text) - length + 1)
        if length and text[i : i + length] == context[-length:]
    )
    assert sorted(found.following(low, high, length, 3, 1000)) == ends
    assert found.find(context[-length:] if length else [0, *context, 3, 0, 1, 2] * 3) == (
        (low, high) if length else (0, 0)
    )


def test_matches_are_spread_over_the_range_where_there_are_many() -> None:
    found = store([[0, 1], [0, 2]] * 50)
    low, high = found.find([0])
    assert (low, high) == (0, 100)
    texts = found.following(low, high, 1, 4, 10)
    assert len(texts) == 10
    assert sorted(texts) == [[1]] * 5 + [[2]] * 5


def draft(found: Datastore, tokens: list[int], nodes: int = 8, depth: int = 9, **options: int) -> list[list[int]]:
    drafter = RestDrafter(found, RestSettings(**options))
    row = Row(tokens, len(tokens), SamplingParams(), max_depth=depth)
    (tree,) = drafter.draft([row], nodes)
    assert tree.log_probs is not None
    assert tree.size <= nodes
    assert set(tree.sources[1:]) <= {"rest"}
    assert all(tree.log_probs[n] <= tree.log_probs[p] for n, p in enumerate(tree.parents) if n)
    assert row.state == {}, "nothing is kept for a row"
    return [[int(tree.tokens[i]) for i in tree.path_to(leaf)[1:]] for leaf in tree.leaves]


def test_the_most_frequent_continuations_are_drafted_first() -> None:
    texts = [[0, 1, 2, 2], [0, 1, 2, 3], [0, 1, 2, 2], [0, 1, 3]]
    found = store(texts)
    assert draft(found, [3, 0, 1], 3) == [[2, 2]]
    assert sorted(draft(found, [3, 0, 1], 5)) == [[2, 2], [2, 3], [3]]
    assert draft(found, [3, 0, 1], depth=1, nodes=3) == [[2], [3]]
    assert draft(found, [3, 0, 1], depth=0) == [[]]
    assert draft(found, [3, 0, 1], nodes=1) == [[]]


def test_shorter_matches_use_what_a_rare_long_one_leaves() -> None:
    found = store([[0, 1, 2], *[[3, 1, 3]] * 6])
    assert draft(found, [0, 1], 2) == [[2]], "the longest match comes first"
    assert [3] in draft(found, [0, 1], 4)
    assert draft(store([[0, 1]]), [2, 3]) == [[]], "nothing matches"


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([[]], {}, "there are no tokens to store"),
        ([[1, 99]], {}, "token ids outside the vocabulary of 19 tokens"),
        ([[1, 2]], {"memory": 0}, "memory must be at least 1 MB, got 0"),
    ],
)
def test_what_cannot_be_stored(texts: list[list[int]], options: dict[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        write("rest", texts, tmp_path / "tables", **options)
    assert not list(tmp_path.iterdir())


def test_a_text_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "LARGEST", 5)
    with pytest.raises(InputError, match="at most 5 tokens"):
        write("rest", [[1, 2], [3, 4]], tmp_path / "tables")
