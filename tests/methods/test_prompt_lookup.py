"""What prompt lookup drafts, and how much it believes in it."""

from __future__ import annotations

import numpy as np
import pytest

from anabranch.methods.base import Context
from anabranch.methods.prompt_lookup import PRIOR, WEIGHT, PromptLookupDrafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree


def draft(tokens: list[int], prompt_length: int, drafter: PromptLookupDrafter | None = None) -> DraftTree:
    drafter = drafter or PromptLookupDrafter(tokens=3)
    (tree,) = drafter.draft([Context(tokens, prompt_length, SamplingParams(), room=9, key=0)])
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
    step_by_step, drafter = [], PromptLookupDrafter(tokens=3)
    for length in range(4, len(text) + 1):
        step_by_step.append(believed(draft(text[:length], 3, drafter)))
    assert step_by_step[-1] == believed(draft(text, 3))
