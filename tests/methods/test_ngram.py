"""The n-gram model against brute force, and what its drafter drafts."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.drafting.drafter import Row
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.ngram import counts
from anabranch.methods.ngram.counts import KATZ, discounts, merged
from anabranch.methods.ngram.entry import NGramDrafter, NGramModel, NGramSettings
from anabranch.sampling import SamplingParams, target_probs
from anabranch.verify import trials
from toy_tables import opened, write

WORDS = 6
documents = st.lists(st.lists(st.integers(0, WORDS - 1), max_size=30), min_size=1, max_size=6).filter(any)


def model(texts: Sequence[Sequence[int]], order: int = 3) -> NGramModel:
    with tempfile.TemporaryDirectory() as home:  # what is mapped outlives its name
        write("ngram", texts, Path(home) / "tables", vocab_size=WORDS)
        return NGramModel(opened("ngram", Path(home) / "tables", WORDS), order)


class BruteForce:
    """Katz's back-off, straight from its definition."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.counts = [
            Counter(tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)) for n in (1, 2, 3)
        ]
        self.falls = [discounts([sum(c == r for c in of.values()) for r in range(1, KATZ + 2)]) for of in self.counts]

    def kept(self, n: int, gram: tuple[int, ...]) -> float:
        count = self.counts[n - 1][gram]
        return count * float(self.falls[n - 1][min(count, KATZ + 1)])

    def probs(self, context: tuple[int, ...]) -> list[float]:
        if not context:
            kept = [self.kept(1, (w,)) for w in range(WORDS)]
            unseen = kept.count(0.0)
            left = max(1.0, sum(self.counts[0].values()) - sum(kept)) if unseen else 0.0
            kept = [k or left / unseen for k in kept]
            return [k / sum(kept) for k in kept]
        lower = self.probs(context[1:])
        n = len(context) + 1
        total = sum(self.counts[n - 1][(*context, w)] for w in range(WORDS))
        if not total:
            return lower
        kept = [self.kept(n, (*context, w)) for w in range(WORDS)]
        rest = sum(p for p, k in zip(lower, kept, strict=True) if not k)
        if all(kept) or rest < 1e-6:
            return [k / sum(kept) for k in kept]
        alpha = (1 - sum(kept) / total) / rest
        return [k / total if k else alpha * p for p, k in zip(lower, kept, strict=True)]


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(documents)
def test_distributions_are_katzs(texts: list[list[int]]) -> None:
    brute = BruteForce(texts)
    for order in (1, 2, 3):
        found = model(texts, order)
        contexts = [(), *((v,) for v in range(WORDS)), *((u, v) for u in range(WORDS) for v in range(WORDS))]
        probs = found.probs([list(context) for context in contexts]).double().numpy()
        assert probs.sum(axis=1) == pytest.approx(1.0, abs=1e-5)
        for context, row in zip(contexts, probs, strict=True):
            wanted = brute.probs(context[max(0, len(context) - order + 1) :])
            assert row == pytest.approx(wanted, abs=1e-5), (order, context)
            best = found.best(found.context(context), WORDS)
            log_probs = [log_prob for _, log_prob, _ in best]
            assert log_probs == sorted(log_probs, reverse=True)
            for word, log_prob, after in best:
                assert math.exp(log_prob) == pytest.approx(row[word], rel=1e-3, abs=1e-6)
                assert after == ((context[-1] if context else -1), word)
            assert {w for w, _, _ in best} == {w for w in range(WORDS) if row[w] > 0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=40), min_size=1, max_size=6), st.integers(1, 9))
def test_merging_runs_block_by_block_is_counting_at_once(parts: list[list[int]], block: int) -> None:
    runs = []
    for part in parts:
        keys, sums = np.unique(np.array(part, np.uint64), return_counts=True)
        runs.append((keys, sums.astype(np.int64)))
    blocks = list(merged(runs, block))
    keys = [int(key) for block_keys, _ in blocks for key in block_keys]
    sums = [int(n) for _, block_sums in blocks for n in block_sums]
    wanted = Counter(key for part in parts for key in part)
    assert keys == sorted(wanted)
    assert dict(zip(keys, sums, strict=True)) == wanted


def test_bounded_memory_gives_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    texts = [random.zipf(1.5, size=n).clip(max=18).tolist() for n in random.integers(1, 400, size=60)]
    write("ngram", texts, tmp_path / "whole")
    monkeypatch.setattr(counts, "BYTES_A_TOKEN", 1 << 14)  # 64 tokens a chunk
    monkeypatch.setattr(counts, "BYTES_AN_ENTRY", 1 << 10)  # 1,024 entries a block
    write("ngram", texts, tmp_path / "parts", memory=1)
    for path in (tmp_path / "whole").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"], "nothing is left behind"
    assert not (tmp_path / "parts" / "scratch").exists()


def test_good_turing_where_the_counts_allow_it() -> None:
    factors = discounts([1000, 400, 220, 140, 100, 75])
    above = 6 * 75 / 1000
    assert factors[1] == pytest.approx((2 * 400 / 1000 - above) / (1 - above))
    assert factors[0] == 0
    assert factors[-1] == 1
    assert (np.diff(factors * np.arange(KATZ + 2)) >= 0).all()
    # counts of counts that do not fall: absolute discounting
    assert discounts([2, 1, 0, 0, 0, 0]).tolist() == pytest.approx([0, 0.5, 0.75, 5 / 6, 0.875, 0.9, 1])
    assert discounts([0, 0, 0, 0, 0, 0])[1] == 0.5


def test_the_tree_has_the_most_probable_nodes() -> None:
    found = model([[1, 2, 3, 1, 2, 4, 1, 2, 3, 5], [1, 2, 3, 1, 2, 3]])
    row = Row([0, 1, 2], 3, SamplingParams(), max_depth=3)
    (tree,) = NGramDrafter(found, NGramSettings(nodes=6)).draft([row], 6)
    assert tree.size == 6
    assert tree.max_depth <= 3
    assert tree.tokens[:2].tolist() == [2, 3]
    assert set(tree.sources[1:]) == {"ngram"}
    assert tree.log_probs is not None
    # every path of up to three tokens by brute force
    every = {}
    for path in np.ndindex(*[WORDS] * 3):
        text, joint = [0, 1, 2], 0.0
        for depth, word in enumerate(path, 1):
            joint += math.log(max(float(found.probs([text])[0, word]), 1e-30))
            text.append(word)
            every[path[:depth]] = joint
    best = sorted(every.values(), reverse=True)[:5]
    assert tree.log_probs[1:].tolist() == pytest.approx(best, abs=1e-4)
    for nodes, depth, size in ((2, 3, 2), (1, 3, 1), (6, 0, 1)):
        short = Row([0, 1, 2], 3, SamplingParams(), max_depth=depth)
        assert NGramDrafter(found).draft([short], nodes)[0].size == size
    (chain,) = NGramDrafter(found, NGramSettings("chain", 4)).draft([row], 9)
    assert chain.parents.tolist() == [-1, 0, 1, 2]


def test_sampled_chains_carry_what_they_were_drawn_from() -> None:
    found = model([[1, 2, 3, 1, 2, 4, 1, 2, 3, 5], [1, 2, 3, 1, 2, 3]])
    drafter = NGramDrafter(found, NGramSettings("chain", 3))
    sampling = SamplingParams(temperature=0.7, top_k=4)
    drawn: Counter[tuple[int, ...]] = Counter()
    for seed in range(600):
        row = Row([0, 1, 2], 3, SamplingParams(temperature=0.7, top_k=4, seed=seed), rule="rejection", max_depth=5)
        (tree,) = drafter.draft([row], 9)
        assert tree.draft_probs is not None
        assert tree.size == 3
        wanted = target_probs(found.probs([[1, 2], [2, int(tree.tokens[1])]]).log(), sampling)
        assert tree.draft_probs.numpy() == pytest.approx(wanted.numpy(), abs=1e-6)
        drawn[tuple(tree.tokens[1:].tolist())] += 1
    first = target_probs(found.probs([[1, 2]]).log(), sampling)[0].numpy()
    for word in range(WORDS):
        share = sum(n for tokens, n in drawn.items() if tokens[0] == word) / 600
        assert share == pytest.approx(first[word], abs=0.08)
    # judged by rejection with p = q, every draft is accepted
    q = first.astype(np.float64) / first.sum()
    assert next(trials(q, q, [int(first.argmax())], True))[0] == 1.0


def test_rejection_needs_a_sampled_chain() -> None:
    found = model([[1, 2, 3]])
    sampled = SamplingParams(temperature=1.0)
    NGramDrafter(found, NGramSettings("chain")).check(sampled, "rejection")
    with pytest.raises(CapabilityError, match="use rule='match', or ngram:tree=chain"):
        NGramDrafter(found).check(sampled, "rejection")
    with pytest.raises(CapabilityError, match="needs temperature > 0"):
        NGramDrafter(found, NGramSettings("chain")).check(SamplingParams(), "rejection")


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([[]], {}, "there are no tokens to count"),
        ([[1, 99]], {}, "token ids outside the vocabulary of 19 tokens"),
        ([[1, 2]], {"memory": 0}, "memory must be at least 1 MB, got 0"),
        ([[1, 2]], {"vocab_size": 1 << 22}, "vocabularies of at most 2,097,152 tokens"),
    ],
)
def test_what_cannot_be_counted(texts: list[list[int]], options: dict[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        write("ngram", texts, tmp_path / "tables", **options)
    assert not list(tmp_path.iterdir())
