"""Drafts of a row that follows a grammar, or that resembles an expected text.

The continuation of the expected text is drafted, nodes that the row's constraint forbids are dropped, and the tokens
that it forces, such as the names of a schema's properties, are drafted: all of it before anything is verified, and for
almost nothing.

    the text ends in   {"name": "Ann",          forced here: ' "', 'age', '":'
    drafted   9 +-- 5 -- 6                      5 is forbidden
                +-- 7                           7 is ' "'
    verified  9 -- 7 -- 8 -- 4

Drafts change the speed and never the text (``verify``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from anabranch.decoding.batch import Member
from anabranch.drafting.expected import PREDICTION
from anabranch.errors import InputError
from anabranch.sampling import Constraint
from anabranch.tree import DraftTree

__all__ = ["FORCED", "guided"]

FORCED = "grammar"  # the source of forced tokens
SHARE = 0.98  # the probability that the target spells forced text as the tokenizer does
LEAVES = 3  # after which forced tokens are sought, besides the root


def guided(member: Member, tree: DraftTree, most: int) -> DraftTree:
    """The draft of a row with what is known of its text, of at most ``most`` nodes, root included.

    A tree for the rule *rejection* stays as it was sampled.
    """
    constraint, row = member.constraint, member.row
    if not member.guided or row.rule != "match" or most < 2:
        return tree
    count = min(row.max_depth, most - 1)
    if member.expected is not None and count > 0:
        following, shares = member.expected.draft(row.tokens[member.begin :], count)
        tree = tree.grafted(0, following, shares, PREDICTION) if following else tree
    if constraint is not None:
        with suppress(InputError):  # beyond a node that the target may never reach; if it does, its own step raises
            tree = _with_forced(constraint, row.tokens, _allowed(constraint, row.tokens, tree), row.max_depth)
    return tree.truncate(most)


def _allowed(constraint: Constraint, text: Sequence[int], tree: DraftTree) -> DraftTree:
    """The nodes whose paths the constraint allows."""
    if tree.size == 1:
        return tree
    kept, left = [0], [(0, list(text))]
    while left:
        node, history = left.pop()
        for child in tree.children(node):
            token = int(tree.tokens[child])
            if constraint.allows(history, token):
                kept.append(child)
                left.append((child, [*history, token]))
    return tree.select(sorted(kept))


def _with_forced(constraint: Constraint, text: Sequence[int], tree: DraftTree, deepest: int) -> DraftTree:
    """The tree with the tokens that are forced after its root and after its most probable leaves."""
    ranks = (tree.depths if tree.log_probs is None else -tree.log_probs).tolist()
    leaves = sorted((leaf for leaf in tree.leaves if leaf), key=ranks.__getitem__)
    for node in (0, *leaves[:LEAVES]):
        path = [int(tree.tokens[each]) for each in tree.path_to(node)[1:]]
        room = deepest - len(path)
        if room > 0 and (forced := constraint.forced([*text, *path])[:room]):
            tree = tree.grafted(node, forced, [SHARE] * len(forced), FORCED)
    return tree
