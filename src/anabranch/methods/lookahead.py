"""Lookahead decoding (Fu et al. 2024): n-grams that the target itself made up ahead of the text are its drafts.

Beside the draft, a window of guessed tokens travels in the target's pass. It has N - 1 levels, N being the length of an
n-gram, and W columns; the token of level i and column j stands i + j positions behind the root. It sees the root, the
columns up to j of level 0, and its own column in the levels between, so the window is a tree (W = 3, N = 4):

    root --- 0,1 --- 0,2          level 0, whose column 0 is the root
      |       |       |
     1,0     1,1     1,2          the token i, j of a later level is what the target said after i - 1, j
      |       |       |           one step earlier: a Jacobi iteration, whose trajectory runs down the column
     2,0     2,1     2,2

The target's tokens after the last level complete an n-gram a column: the token of level 0, then its column, then the
new one. They go to a pool by their first token, and every level moves up by one. Where the pool has n-grams that begin
with the root, they are the draft: up to G of them, the newest first, merged as a trie and verified in the same pass.

The authors' implementation files the n-gram of column 0 under the root, although its second token was guessed after
what level 1 had guessed in the root's place. Here it is filed under that guess, so that every n-gram is a chain of
tokens that the target said one after another; more guesses are right.

Window nodes are probes (``ProbingDrafter``): none of them is ever accepted, so they do not count as drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.drafting.acceptance import joint_log_probs
from anabranch.drafting.drafter import Drafter, Method, Needs, Observation, Row
from anabranch.drafting.settings import Settings
from anabranch.errors import CapabilityError, InputError
from anabranch.model.decoder import Decoder
from anabranch.tree import DraftTree

__all__ = ["METHOD", "LookaheadDrafter", "LookaheadSettings", "Pool", "Window"]

# the share of guesses whose first token, and whose later tokens given those before, were right, before a row has shown
# its own, and how many guesses that is worth
FIRST, LATER = 0.25, 0.5
WEIGHT = 8.0


class Pool:
    """The n-grams by their first token: of each the ``guesses`` newest.

    Memory grows by at most a window's width of n-grams a step, and goes with the row.
    """

    def __init__(self, guesses: int) -> None:
        self.guesses = guesses
        self._by_first: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Take in an n-gram; one that is known becomes the newest."""
        known = self._by_first.setdefault(first, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]

    def after(self, first: int) -> list[tuple[int, ...]]:
        """Continuations of ``first`` in the n-grams that begin with it, the newest first."""
        return list(reversed(self._by_first.get(first, {})))


class Window:
    """The guessed tokens by level and column; ``levels[0][0]`` is what was guessed where the root now stands.

    It starts with level 0 alone, W + N - 2 tokens, and gains a level and loses a column a step until it has N - 1
    levels of W columns.
    """

    def __init__(self, guessed: Sequence[int], ngram: int) -> None:
        self.levels = [list(guessed)]
        self.ngram = ngram

    def cut(self, depth: int) -> None:
        """Drop the columns that reach deeper than ``depth`` below the root: the text ends before them."""
        columns = max(0, depth - len(self.levels) + 2)
        self.levels = [level[:columns] for level in self.levels] if columns else [[]]

    def tree(self, root: int) -> DraftTree:
        """The window below a root, level by level."""
        tokens, parents = [root], [-1]
        above = [0]  # nodes of the level above by column
        for token in self.levels[0][1:]:
            parents.append(above[-1])
            above.append(len(tokens))
            tokens.append(token)
        for level in self.levels[1:]:
            parents += above
            above = list(range(len(tokens), len(tokens) + len(level)))
            tokens += level
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))

    def advance(self, said: Sequence[int]) -> list[tuple[int, ...]]:
        """Move on by a step, given the target's tokens after each node; returns the n-grams completed by them.

        The n-gram of column 0 begins with the token that its second one was guessed after, which is the root only where
        that token was right.
        """
        levels = self.levels
        if len(levels) == 1:
            self.levels = [levels[0][1:], list(said)] if said else [[]]
            return []
        new = list(said[-len(levels[-1]) :])
        if len(levels) == self.ngram - 1:
            self.levels = [*levels[1:], new]
            return list(zip(*levels, new, strict=True))
        self.levels = [*(level[1:] for level in levels), new[1:]] if new[1:] else [[]]
        return []


@dataclass
class _Ahead:
    """State of a row.

    read         its tokens whose n-grams are in the pool
    guessed      the guesses of its last draft, and where they begin in the text
    right, all   by depth, guessed tokens that came, and those that were judged
    """

    window: Window
    pool: Pool
    read: int = 0
    guessed: tuple[int, list[tuple[int, ...]]] | None = None
    right: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)

    def settle(self, text: Sequence[int]) -> None:
        """Count which of the last guesses came: newer ones first, later ones only where those before were wrong."""
        if self.guessed is None:
            return
        at, paths = self.guessed
        for depth, token in enumerate(text[at : at + len(self.right)]):
            for guess in dict.fromkeys(path[depth] for path in paths if depth < len(path)):
                self.all[depth] += 1
                if guess == token:
                    self.right[depth] += 1
                    break
            paths = [path for path in paths if depth < len(path) and path[depth] == token]
        self.guessed = None


@dataclass(frozen=True)
class LookaheadSettings(Settings):
    """Settings of ``lookahead:...``.

    window   W: columns of the window, of guessed tokens at successive positions
    ngram    N: tokens of an n-gram; the window has N - 1 levels
    guesses  G: n-grams that are verified at most
    prompt   yes: the text's own n-grams are guesses too, as in prompt lookup
    """

    least = (("window", 1), ("guesses", 1))
    window: int = 10
    ngram: int = 5
    guesses: int = 10
    prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngram < 3:
            raise InputError(
                f"ngram must be at least 3 (a token, its successor, and the one that follows), got {self.ngram}"
            )


class LookaheadDrafter(Drafter):
    """Guesses of up to N - 1 tokens from the n-grams of a Jacobi window."""

    name = "lookahead"

    def __init__(self, settings: LookaheadSettings | None = None) -> None:
        self.settings = settings = settings or LookaheadSettings()
        window, self.ngram = settings.window, settings.ngram
        self.max_nodes = 1 + settings.guesses * (self.ngram - 1)
        # column 0 of level 0 is the root; while it fills, the window is wider than W
        probes = max((window + self.ngram - 2 - level) * (level + 1) - 1 for level in range(self.ngram - 1))
        self.needs = Needs(probes=probes)

    def join(self, row: Row) -> None:
        """Fill level 0 with tokens of the prompt, the same for the same prompt."""
        guessed = [row.root, *random.Random(0).choices(row.context, k=self.settings.window + self.ngram - 3)]
        lengths = self.ngram - 1
        row.state[self] = _Ahead(
            Window(guessed, self.ngram),
            Pool(self.settings.guesses),
            right=[WEIGHT * (LATER if depth else FIRST) for depth in range(lengths)],
            all=[WEIGHT] * lengths,
        )

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        """The n-grams that begin with each row's root, as a trie."""
        return [self._draft(row, budget) for row in rows]

    def depth_of(self, budget: int) -> int:
        """At most an n-gram without its first token."""
        return min(budget - 1, self.ngram - 1)

    def _draft(self, row: Row, budget: int) -> DraftTree:
        ahead: _Ahead = row.state[self]
        text = row.context
        ahead.settle(text)
        if self.settings.prompt:
            for end in range(max(self.ngram, ahead.read + 1), len(text) + 1):
                ahead.pool.add(text[end - self.ngram], tuple(text[end - self.ngram + 1 : end]))
            ahead.read = len(text)
        guesses = [guess[: row.max_depth] for guess in ahead.pool.after(row.root)] if row.max_depth > 0 else []
        if not guesses or budget < 2:
            return DraftTree.root(row.root)
        ahead.guessed = (len(text), guesses)
        shares = [right / total for right, total in zip(ahead.right, ahead.all, strict=True)]
        log_probs = joint_log_probs([(guess, shares) for guess in guesses])
        tree = DraftTree.from_paths(row.root, guesses, source=self.name, log_probs=log_probs)
        return tree.truncate(min(budget, self.max_nodes))

    def probe(self, rows: Sequence[Row]) -> list[DraftTree]:
        """Each row's window."""
        trees = []
        for row in rows:
            ahead: _Ahead = row.state[self]
            ahead.window.cut(row.max_depth)
            trees.append(ahead.window.tree(row.root))
        return trees

    def observe(self, rows: Sequence[Row], seen: Observation) -> None:
        """Collect the n-grams that the pass completed, and move the windows on."""
        for row, said in zip(rows, seen.probed, strict=True):
            ahead: _Ahead = row.state[self]
            if len(said):
                for first, *rest in ahead.window.advance(said.tolist()):
                    ahead.pool.add(first, tuple(rest))


def _build(target: Decoder, settings: LookaheadSettings, module: object) -> Drafter:
    drafter = LookaheadDrafter(settings)
    limit = target.config.max_positions
    if drafter.margin >= limit:
        raise CapabilityError(
            f"window={settings.window}, ngram={settings.ngram} and guesses={settings.guesses} take {drafter.margin} "
            f"cache positions a step, but the target has {limit} in all; use a smaller window or fewer guesses"
        )
    return drafter


METHOD = Method(
    name="lookahead",
    summary="n-grams that the target made up ahead of the text, in a window beside the draft; needs nothing",
    settings=LookaheadSettings,
    with_source=True,
    build=_build,
    labels=("lookahead",),
)
