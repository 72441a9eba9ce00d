"""The inner drafter of staged speculative decoding: it guesses what the draft model will draft.

Its guesses join the passes of the draft model, which computes what follows each of them. A guess that the draft model
drafts too costs no pass of its own; the tree that is drafted does not depend on the guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.drafting.autoregressive import AutoregressiveDrafter
from anabranch.drafting.drafter import Call, Drafter, Row, tally
from anabranch.drafting.reader import Continuations
from anabranch.errors import CapabilityError

__all__ = ["Guesser"]


@dataclass
class _Inside:
    """A row as the inner drafter sees it, and whether that keeps anything for it."""

    row: Row
    keeps: bool


class Guesser:
    """An inner drafter and its view of the rows.

    A drafter that keeps nothing for a row is a function of the text, so it is asked behind each node whose next tokens
    are wanted. One that indexes or caches the text, which must only grow, is asked behind the text alone.

    most  guesses of a row in one pass, at most: each is one more row of that pass
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        if drafter.needs.rider is not None or drafter.needs.layers or drafter.needs.prompt:
            raise CapabilityError(
                f"the inner drafter {drafter.name!r} needs hidden states of its target; use a model-free one, such as "
                "inner=prompt_lookup"
            )
        self.drafter, self.most = drafter, most
        self._rows: dict[Row, _Inside] = {}

    def join(self, row: Row) -> None:
        """A row joins the batch."""
        inside = Row(row.tokens, row.prompt_length, row.sampling, source=row.source)
        self.drafter.join(inside)
        keeps = self.drafter in inside.state or isinstance(self.drafter, AutoregressiveDrafter)
        self._rows[row] = _Inside(inside, keeps)

    def leave(self, row: Row) -> None:
        """A row leaves the batch."""
        inside = self._rows.pop(row, None)
        if inside is not None:
            self.drafter.leave(inside.row)

    def guesses(self, row: Row, continuations: Continuations, node: int, *, depth: int, words: int) -> list[int]:
        """Guessed descendants of a node of a row's continuations, at most ``depth`` deep, of token ids below ``words``.

        Nodes whose next tokens are known already are left out.
        """
        inside = self._rows[row]
        if (inside.keeps and node > 0) or continuations.depths[node] >= depth:
            return []
        inside.row.tokens = [*row.tokens, *continuations.path(node)] if node else row.tokens
        inside.row.max_depth = depth - continuations.depths[node]
        (tree,) = self.drafter.draft([inside.row], min(self.most + 1, self.drafter.max_nodes))
        for call in inside.row.calls or (Call("inner"),):
            tally(call, [row])
        inside.row.calls.clear()
        at = [node]
        for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True):
            above = at[parent]
            at.append(continuations.child(above, token) if above >= 0 and token < words else -1)
        return [guess for guess in dict.fromkeys(at[1:]) if guess > 0 and guess not in continuations.known]
