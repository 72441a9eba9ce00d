"""Suffix decoding: its index against a search, its trees against an enumeration, its memory, its learning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.drafting.matches import PRIOR
from anabranch.methods import Row, make_drafter
from anabranch.methods.suffix import (
    CONTEXT,
    OVERHEAD,
    OWN,
    SHARED,
    UNSEEN,
    WEIGHT,
    Occurrences,
    SuffixDrafter,
    SuffixSettings,
    _Vote,
    tree_of,
)
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import decode, request, small

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)
CONTEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def agreement(text: Sequence[int], end: int, context: list[int]) -> int:
    most = min(CONTEXT, end, len(context))
    return max(n for n in range(most + 1) if list(text[end - n : end]) == context[len(context) - n :])


def searched(texts: Sequence[Sequence[int]], context: list[int]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Every place with a token behind it before which the end of ``context`` stands."""
    for text in texts:
        for end in range(1, len(text)):
            if length := agreement(text, end, context):
                yield tuple(text), end, length


def index_of(texts: Sequence[Sequence[int]], bound: int | None = None, buckets: int = 8) -> Occurrences:
    """The texts, a token of each in turn, as rows of a batch grow."""
    index = Occurrences(tokens=bound, buckets=buckets)
    keys = [index.begin() for _ in texts]
    for place in range(max(map(len, texts))):
        for key, text in zip(keys, texts, strict=True):
            index.extend(key, text[place : place + 1])
            assert bound is None or index.held <= bound
    return index


@given(TEXTS, CONTEXTS)
@settings(deadline=None)
def test_what_is_found_is_what_a_search_finds(texts: list[list[int]], context: list[int]) -> None:
    index = index_of(texts)
    found = [(tuple(place.tokens), place.end, place.length) for place in index.find(context, 1000)]
    assert Counter(found) == Counter(searched(texts, context))
    lengths = [length for *_, length in found]
    for order in (8, 4, 2):
        assert sorted(lengths, key=lambda n: n < order) == lengths, "longer n-grams come first"
    assert found[:3] == [(tuple(p.tokens), p.end, p.length) for p in index.find(context, 3)]


@given(TEXTS, CONTEXTS, st.integers(OVERHEAD, 60))
@settings(deadline=None)
def test_at_its_bound_the_oldest_texts_go_and_the_rest_is_right(
    texts: list[list[int]], context: list[int], bound: int
) -> None:
    index = index_of(texts, bound)
    live = [tuple(text.tokens) for text in index._texts.values()]
    assert index.held == sum(len(text) + OVERHEAD for text in live) <= bound
    assert live == [tuple(text) for text in texts[len(texts) - len(live) :]], "the newest stay, whole"
    found = Counter((tuple(place.tokens), place.end, place.length) for place in index.find(context, 1000))
    assert found <= Counter(searched(live, context))


def test_a_text_that_alone_is_too_long_is_given_up() -> None:
    index = Occurrences(tokens=64, buckets=64)
    key = index.begin()
    index.extend(key, list(range(200)))
    assert (index.held, index.find([5])) == (0, [])
    other = index.begin()
    index.extend(other, [1, 2, 3])
    index.extend(key, [1, 9])
    assert [place.tokens[place.end] for place in index.find([1])] == [2]


def test_a_text_can_be_left_out_and_dropped() -> None:
    index = Occurrences(tokens=None, buckets=4)
    first, second = index.begin(), index.begin()
    index.extend(first, [1, 2])
    index.extend(second, [1, 3])
    assert [place.tokens[place.end] for place in index.find([1])] == [3, 2]
    assert [place.tokens[place.end] for place in index.find([1], but=second)] == [2]
    index.drop(first)
    index.drop(first)
    assert index.held == 2 + OVERHEAD


# -- trees --------------------------------------------------------------------------------------------------------
def enumerated(votes: Sequence[_Vote], odds: Sequence[float], depth: int) -> dict[tuple[int, ...], float]:
    """The probability of every path, by the definition at the top of the module."""
    found: dict[tuple[int, ...], float] = {}

    def weight(vote: _Vote, ahead: int) -> float:
        return odds[min(vote.length + ahead, len(odds) - 1)]

    def walk(path: tuple[int, ...], joint: float, those: Sequence[_Vote]) -> None:
        ahead = len(path)
        going = [v for v in those if v.place.end + ahead < len(v.place.tokens)]
        said = {v.place.tokens[v.place.end + ahead] for v in going}
        total = sum(weight(v, ahead) for v in going) + UNSEEN
        for token in said if ahead < depth else ():
            saying = [v for v in going if v.place.tokens[v.place.end + ahead] == token]
            longer = (*path, token)
            found[longer] = joint * sum(weight(v, ahead) for v in saying) / total
            walk(longer, found[longer], saying)

    walk((), 1.0, votes)
    return found


@given(TEXTS, CONTEXTS, st.integers(2, 9), st.integers(1, 4))
@settings(deadline=None)
def test_a_tree_has_the_most_probable_continuations(
    texts: list[list[int]], context: list[int], count: int, depth: int
) -> None:
    odds = [0.0, *(share / (1 - share) for share in PRIOR)]
    votes = [_Vote(place, place.length, OWN) for place in index_of(texts).find(context, 1000)]
    every = enumerated(votes, odds, depth)
    tree = tree_of(7, votes, odds, count, depth, threshold=0.0)
    assert tree.log_probs is not None
    found = {
        tuple(int(tree.tokens[i]) for i in tree.path_to(node)[1:]): math.exp(tree.log_probs[node])
        for node in range(1, tree.size)
    }
    assert found == pytest.approx({path: every[path] for path in found}, rel=1e-4)
    assert sorted(found.values()) == pytest.approx(sorted(sorted(every.values())[::-1][: count - 1]), rel=1e-4)
    cut = tree_of(7, votes, odds, 1000, depth, threshold=0.2)
    doubtful = sum(abs(p - 0.2) < 1e-9 for p in every.values())
    assert abs(cut.size - 1 - sum(p >= 0.2 for p in every.values())) <= doubtful


# -- the drafter ----------------------------------------------------------------------------------------------------
def row_of(tokens: Sequence[int], prompt_length: int | None = None, depth: int = 9) -> Row:
    prompt = len(tokens) if prompt_length is None else prompt_length
    return Row(list(tokens), prompt, SamplingParams(), max_depth=depth)


def of_row(row: Row, drafter: SuffixDrafter, budget: int = 16) -> DraftTree:
    if drafter not in row.state:
        drafter.join(row)
    (tree,) = drafter.draft([row], budget)
    return tree


def test_where_the_places_agree_a_chain_and_where_they_do_not_branches() -> None:
    tree = of_row(row_of([1, 2, 3, 8, 1, 2, 3, 9, 1, 2]), SuffixDrafter(SuffixSettings(depth=2, threshold=0.0)))
    assert tree.tokens.tolist() == [2, 3, 9, 8] or tree.tokens.tolist() == [2, 3, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1, 1]
    one = of_row(row_of([1, 2, 3, 4, 1, 2]), SuffixDrafter(SuffixSettings(depth=1)))
    assert one.log_probs is not None
    assert math.exp(one.log_probs[1]) == pytest.approx(PRIOR[1])


def test_outputs_are_shared_while_they_are_written_and_prompts_are_not() -> None:
    drafter = SuffixDrafter()
    writer, reader = row_of([5, 6, 7], 3), row_of([9, 1, 2])
    of_row(writer, drafter)
    writer.tokens += [1, 2, 3, 4]
    assert of_row(reader, drafter).size == 1, "nothing was taken in since"
    of_row(writer, drafter)
    tree = of_row(reader, drafter)
    assert tree.tokens.tolist() == [2, 3, 4]
    assert tree.sources == ("target", SHARED, SHARED)
    assert of_row(row_of([5, 6]), drafter).size == 1, "the prompt of another row"
    alone = SuffixDrafter(SuffixSettings(store=0))
    of_row(writer, alone)
    assert of_row(reader, alone).size == 1


def test_what_a_row_wrote_last_stays_when_it_leaves() -> None:
    drafter = SuffixDrafter()
    writer = row_of([5, 6], 2)
    of_row(writer, drafter)
    writer.tokens += [1, 2, 3]
    drafter.leave(writer)
    drafter.leave(writer)
    assert writer.state == {}
    assert of_row(row_of([1, 2]), drafter).tokens.tolist() == [2, 3]


def test_right_and_wrong_drafts_change_what_is_believed() -> None:
    drafter = SuffixDrafter(SuffixSettings(depth=1))
    row = row_of([5, 6, 5])
    before = of_row(row, drafter)
    row.tokens += [6, 5]
    seen = row.state[drafter]
    of_row(row, drafter)
    assert seen.rates(1) == pytest.approx((WEIGHT * PRIOR[0] + 1) / (WEIGHT + 1))
    row.tokens += [9, 5]
    of_row(row, drafter)
    assert seen.rates(3) == pytest.approx(WEIGHT * PRIOR[2] / (WEIGHT + 1)), "three tokens matched"
    assert before.tokens.tolist() == [5, 6]


def test_memory_stays_at_its_bound_while_rows_come_and_go() -> None:
    drafter = SuffixDrafter(SuffixSettings(store=128))
    assert drafter.shared is not None
    for start in range(40):
        row = row_of([start, start + 1], 2)
        of_row(row, drafter)
        row.tokens += range(start, start + 20)
        drafter.leave(row)
        assert drafter.shared.held <= 128
    assert len(drafter.shared._texts) == 128 // (20 + OVERHEAD)


def test_drafts_keep_to_their_budget_and_depth() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    for budget, depth, size in ((10, 9, 7), (3, 9, 3), (1, 9, 1), (10, 2, 3), (10, 0, 1)):
        assert of_row(row_of(text, depth=depth), SuffixDrafter(SuffixSettings(threshold=0.0)), budget).size == size
    assert SuffixDrafter(SuffixSettings(depth=4)).depth_of(16) == 4


def test_what_was_decoded_once_is_decoded_in_few_passes() -> None:
    target, drafter = small(), SuffixDrafter()
    asked = [request(9, seed, 24) for seed in range(3)]
    wanted, plain = decode(target, asked)
    first, _ = decode(target, asked, drafter, rows=2)
    again, steps = decode(target, asked, drafter, rows=2)
    assert first == again == wanted
    assert sum(map(len, steps)) < sum(map(len, plain)) / 3


def test_settings_make_the_drafter() -> None:
    drafter = make_drafter("suffix:nodes=auto,store=0", small())
    assert isinstance(drafter, SuffixDrafter)
    assert drafter.adaptive
    assert drafter.shared is None
    merged = make_drafter("suffix:nodes=9+prompt_lookup", small())
    assert (merged.max_nodes, merged.adaptive) == (9, False)
