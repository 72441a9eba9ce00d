"""The drafts of prompt lookup and their probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.drafting.drafter import Row
from anabranch.drafting.matches import PRIOR
from anabranch.methods.prompt_lookup import WEIGHT, Index, LookupSettings, PromptLookupDrafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree


def draft(tokens: list[int], prompt_length: int, drafter: PromptLookupDrafter | None = None) -> DraftTree:
    drafter = drafter or PromptLookupDrafter(LookupSettings(tokens="3"))
    return of_row(Row(tokens, prompt_length, SamplingParams(), max_depth=9), drafter)


def of_row(row: Row, drafter: PromptLookupDrafter, budget: int = 10) -> DraftTree:
    if drafter not in row.state:
        drafter.join(row)
    (tree,) = drafter.draft([row], budget)
    return tree


def believed(tree: DraftTree) -> list[float]:
    assert tree.log_probs is not None
    return np.exp(tree.log_probs[1:]).tolist()  # type: ignore[no-any-return]


def test_the_longest_match_is_continued() -> None:
    assert draft([1, 2, 3, 4, 7, 3, 9, 2, 3], 9).tokens.tolist() == [3, 4, 7, 3]
    assert draft([1, 2, 3], 3).tokens.tolist() == [3]


def test_longer_matches_are_believed_more() -> None:
    one, two = draft([5, 6, 7, 8, 5], 5), draft([4, 5, 6, 7, 8, 4, 5], 7)
    assert believed(one) == pytest.approx(np.cumprod(PRIOR[:3]), rel=1e-5)
    assert believed(two) == pytest.approx(np.cumprod(PRIOR[1:4]), rel=1e-5)
    # five tokens match, though three are looked up
    five = draft([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5], 13)
    assert believed(five) == pytest.approx(np.cumprod(PRIOR[4:7]), rel=1e-5)


def test_the_answer_teaches_and_the_prompt_does_not() -> None:
    # behind the prompt 5 6 5: matches of 5 (one token) and then 6 (two, "5 6") go on as before, then 9 does not
    text = [5, 6, 5, 6, 5, 9, 5]
    right = [WEIGHT * share for share in PRIOR]
    untaught, taught = draft(text, 7), draft(text, 3)
    assert believed(untaught)[0] == pytest.approx(PRIOR[0], rel=1e-5)
    # one match of one token, "5" before the first 6 of the answer: it went on
    assert believed(taught)[0] == pytest.approx((right[0] + 1) / (WEIGHT + 1), rel=1e-5)


def test_the_belief_depends_on_the_text_alone() -> None:
    text = [5, 6, 5, 6, 5, 6, 7, 5, 6]
    drafter = PromptLookupDrafter(LookupSettings(tokens="3"))
    row = Row(text[:4], 3, SamplingParams(), max_depth=9)
    for token in (None, *text[4:]):
        if token is not None:
            row.tokens.append(token)
        last = believed(of_row(row, drafter))
    assert last == believed(draft(text, 3))


def test_drafts_keep_to_their_budget_and_depth() -> None:
    text = [1, 2, 3, 4, 7, 3, 9, 2, 3]
    for budget, depth, size in ((10, 9, 4), (3, 9, 3), (1, 9, 1), (10, 1, 2), (10, 0, 1)):
        row = Row(list(text), 9, SamplingParams(), max_depth=depth)
        assert of_row(row, PromptLookupDrafter(LookupSettings(tokens="3")), budget).size == size


def test_a_row_that_leaves_takes_its_index_along() -> None:
    drafter = PromptLookupDrafter()
    row = Row([1, 2, 1], 3, SamplingParams(), max_depth=9)
    of_row(row, drafter)
    drafter.leave(row)
    assert row.state == {}


# -- several matches ---------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 4))
@settings(deadline=None)
def test_all_matches_are_what_a_search_finds(text: list[int], ngram: int) -> None:
    index = Index(ngram)
    for length in range(1, len(text) + 1):
        index.extend(text[:length], len(text))
    agree = [max(n for n in range(end + 1) if text[end - n : end] == text[len(text) - n :]) for end in range(len(text))]
    wanted = [(end, min(n, len(PRIOR)) if n >= ngram else n) for end, n in enumerate(agree) if n]
    wanted.sort(key=lambda match: (-min(match[1], ngram), -match[0]))
    assert list(index.matches(text, len(text))) == wanted


def test_matches_are_merged_into_a_tree() -> None:
    text = [1, 2, 3, 8, 1, 2, 3, 9, 4, 1, 2]
    assert draft(text, 11).tokens.tolist() == [2, 3, 9, 4]
    tree = draft(text, 11, PromptLookupDrafter(LookupSettings(tokens="6", matches=2)))
    assert tree.tokens.tolist() == [2, 3, 9, 4, 1, 2, 8]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3, 4, 1]
    chain = np.cumprod(PRIOR[1:6])
    assert believed(tree) == pytest.approx([*chain, PRIOR[1] * (1 - PRIOR[2]) * PRIOR[2]], rel=1e-5)
    best = draft(text, 11, PromptLookupDrafter(LookupSettings(tokens="3", matches=2)))
    assert best.tokens.tolist() == [2, 3, 9, 4], "the most probable nodes of both"


def test_shorter_matches_follow_longer_ones() -> None:
    tree = draft([7, 2, 5, 1, 2, 6, 1, 2], 8, PromptLookupDrafter(LookupSettings(tokens="2", matches=2)))
    assert set(tree.tokens.tolist()[1:]) <= {6, 1, 5}
    assert tree.tokens.tolist()[1] == 6
