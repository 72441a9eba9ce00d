"""The constraint of one text: which tokens may follow any beginning of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import InputError
from anabranch.structure.grammar import Compiled, named, reason

__all__ = ["GrammarConstraint"]


class GrammarConstraint:
    """The ``sampling.Constraint`` of a text that follows ``start`` tokens of a prompt.

    A text ends where the grammar accepts it: the tokens that end it are allowed there and nowhere else.

    The answers depend on the tokens alone. A matcher stands at the tokens of the last question, since the next one is
    mostly about tokens that continue them: it goes back to where both part, and on from there.

    ends  token ids that end the text besides those of the vocabulary; ids of text among them are matched as text
    """

    def __init__(self, grammar: Compiled, start: int, ends: frozenset[int] = frozenset()) -> None:
        self.grammar, self.start = grammar, start
        self.ends = grammar.vocabulary.ends | (ends & grammar.vocabulary.special)
        self._ends = np.array(sorted(self.ends), np.int64)
        self._matcher: Any = None
        self._path: list[int] = []  # that the matcher has consumed

    def allowed(self, tokens: Sequence[int], vocabulary: int) -> NDArray[np.bool_]:
        """Return whether each token of the vocabulary [V] may follow. Raises InputError where none may."""
        if not self._stand(tokens):
            return np.ones(vocabulary, np.bool_)
        accepted = self._matcher.is_accepting()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask_V = np.unpackbits(bits, count=vocabulary, bitorder="little").view(np.bool_)
        mask_V[self._ends[self._ends < vocabulary]] = accepted
        if len(single := mask_V.nonzero()[0]) == 1 and int(single[0]) not in self.ends:
            # where no token can spell what has to follow, llguidance (1.9) allows token 0
            mask_V[single] = self._matcher.validate_tokens(single.tolist()) == 1
        if self._matcher.is_error() or not mask_V.any():
            self._refuse(len(self._path))
        return mask_V

    def allows(self, tokens: Sequence[int], token: int) -> bool:
        """Return whether one token may follow."""
        if not self._stand(tokens):
            return True
        if token in self.ends:
            return bool(self._matcher.is_accepting())
        return self._consume([token]) == 1

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that must follow, as the tokenizer spells the text that must follow; the target may spell it
        in other tokens. Empty where there is a choice."""
        if not self._stand(tokens):
            return []
        following: list[int] = self._matcher.compute_ff_tokens()
        following = following[: self._consume(following)]
        if len(self.ends) == 1 and self._matcher.is_accepting() and self._matcher.is_stopped():
            following.extend(self.ends)
        return following

    def _stand(self, tokens: Sequence[int]) -> bool:
        """Move the matcher behind the new ones of ``tokens``; False if the text has ended before."""
        path, ours = list(tokens[self.start :]), self._path
        if self._matcher is None:
            self._matcher, self._path = self.grammar.matcher.deep_copy(), (ours := [])
        shared = min(len(ours), len(path))
        while ours[:shared] != path[:shared]:  # paths part near their ends, at a node of a tree
            shared -= 1
        if not self.ends.isdisjoint(path[shared:]):
            return False
        if shared < len(ours):
            back = self._matcher.rollback(len(ours) - shared)
            assert back, "a matcher goes back to any earlier token"
            del ours[shared:]
        consumed = self._consume(path[shared:])
        assert consumed == len(path) - shared, "the text so far follows the grammar"
        return True

    def _consume(self, tokens: Sequence[int]) -> int:
        """Let the matcher go on over tokens as far as the grammar allows them; returns how many those are."""
        count: int = self._matcher.try_consume_tokens(list(tokens)) if tokens else 0
        if self._matcher.is_error():
            self._refuse(len(self._path))
        self._path += tokens[:count]
        return count

    def _refuse(self, new: int) -> NoReturn:
        """Raise InputError for a grammar that came to a dead end, or grew beyond llguidance's limits."""
        why, self._matcher = reason(self._matcher.get_error()), None
        if not why or "NoExtension" in why:
            raise InputError(
                f"{named(self.grammar.source)} allows no token after {new} new ones; let each of its rules match text "
                "that the model's tokens can spell"
            )
        raise InputError(f"{named(self.grammar.source)} is too complex after {new} new tokens: {why}; simplify it")
