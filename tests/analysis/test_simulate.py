"""Replays against decodings that really used the narrower settings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_trace import SAMPLED, record

from anabranch.analysis.simulate import Cut, Latency, Ranking, merged, overlap, replay, simulate
from anabranch.decoding.engine import Step
from anabranch.decoding.stats import Stats
from anabranch.drafting.acceptance import Acceptance
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.tree import DraftTree
from small import request

WIDE = "streams:nodes=30,k=8,frontier=30"
SPECS = ("streams:nodes=12", "prompt_lookup")
REQUESTS = [request(9, seed=1, new=40), request(6, seed=2, new=33), request(12, seed=6, new=40, sampling=SAMPLED)]

#     9 (0) +-- 1 (1: -0.1, stream 1) +-- 3 (3: -0.3, stream 2)
#           |                         +-- 5 (4: -1.1, prompt_lookup)
#           +-- 2 (2: -2.0, prompt_lookup)
TREE = DraftTree(
    np.array([9, 1, 2, 3, 5]),
    np.array([-1, 0, 0, 1, 1]),
    sources=("target", "stream 1", "prompt_lookup", "stream 2", "prompt_lookup"),
    log_probs=np.array([0, -0.1, -2.0, -0.3, -1.1], np.float32),
)


def histogram(steps: list[Step]) -> Counter[int]:
    """Accepted draft tokens a step, of steps whose acceptance was not cut by the end of the text."""
    return Counter(len(step.tokens) - 1 for step in steps)


@pytest.mark.parametrize(
    ("cut", "left"),
    [
        (Cut(), [0, 1, 2, 3, 4]),
        (Cut(nodes=3), [0, 1, 3]),
        (Cut(nodes=1), [0]),
        (Cut(depth=1), [0, 1, 2]),
        (Cut(depth=0), [0]),
        (Cut(k=1), [0, 1, 3]),
        (Cut(threshold=0.5), [0, 1, 3]),
        (Cut(drop=("prompt_lookup",)), [0, 1, 3]),
        (Cut(drop=("stream",)), [0, 2]),
        (Cut(drop=("stream 2",)), [0, 1, 2, 4]),
        (Cut(k=1, drop=("stream 2",)), [0, 1, 4]),
    ],
)
def test_nodes_that_a_cut_keeps(cut: Cut, left: list[int]) -> None:
    assert cut(TREE).tokens.tolist() == TREE.tokens[left].tolist()


@pytest.mark.parametrize(
    "spec", ["none", "prompt_lookup", WIDE, "streams:tree=product,k=3", "streams:tree=chain", f"{WIDE}+prompt_lookup"]
)
def test_the_recorded_settings_give_what_was_counted(tmp_path: Path, spec: str) -> None:
    trace, steps = record(tmp_path / "run.jsonl", spec, REQUESTS)
    prediction, stats = simulate(trace), Stats.of(steps)
    assert prediction.mean_acceptance_length == stats.mean_acceptance_length
    assert (prediction.tokens, prediction.steps, prediction.draft_nodes) == (
        stats.tokens,
        stats.steps,
        stats.draft_nodes,
    )
    assert prediction.accepted == stats.accepted
    assert prediction.acceptance_by_depth() == stats.acceptance_by_depth()
    assert prediction.floor is None


def test_the_recorded_settings_of_reject_too(tmp_path: Path) -> None:
    requests = [request(8, seed=seed, new=40, sampling=SAMPLED, rule="rejection") for seed in range(3)]
    trace, steps = record(tmp_path / "run.jsonl", "streams:tree=product,k=2", requests, rule="rejection")
    prediction, stats = simulate(trace), Stats.of(steps)
    assert prediction.accepted == stats.accepted
    assert prediction.mean_acceptance_length == stats.mean_acceptance_length
    assert 0 < (overlap(trace) or 0) < 1
    shallow = simulate(trace, Cut(depth=1))
    assert shallow.steps == stats.steps
    assert shallow.accepted[1] == sum(n for a, n in stats.accepted.items() if a >= 1)
    for cut in (Cut(nodes=2), Cut(threshold=0.1), Cut(drop=("stream 1",))):
        with pytest.raises(CapabilityError, match="rejection"):
            simulate(trace, cut)


@pytest.mark.parametrize(
    ("cut", "narrow"),
    [
        (Cut(), WIDE),
        (Cut(nodes=12), "streams:nodes=12,k=8,frontier=30"),
        (Cut(nodes=4), "streams:nodes=4,k=8,frontier=30"),
        (Cut(threshold=0.02), f"{WIDE},threshold=0.02"),
        (Cut(nodes=1), "none"),
    ],
)
def test_a_recording_of_every_position_replays_without_error(tmp_path: Path, cut: Cut, narrow: str) -> None:
    every, _ = record(tmp_path / "every.jsonl", WIDE, REQUESTS, every_position=True)
    _, steps = record(tmp_path / "real.jsonl", narrow, REQUESTS)
    prediction = simulate(every, cut)
    assert (prediction.tokens, prediction.steps) == (Stats.of(steps).tokens, len(steps))
    assert prediction.draft_nodes == Stats.of(steps).draft_nodes
    assert prediction.accepted == histogram(steps)
    assert prediction.floor is None
    assert max(prediction.accepted) > 0 or narrow == "none"


@pytest.mark.parametrize(
    ("cut", "narrow"),
    [(Cut(k=2), "streams:tree=product,k=2"), (Cut(k=1), "streams:tree=chain"), (Cut(depth=2), "PRODUCT,depth=2")],
)
def test_product_trees_hold_all_smaller_ones(tmp_path: Path, cut: Cut, narrow: str) -> None:
    wide = "streams:tree=product,k=4"
    every, _ = record(tmp_path / "every.jsonl", wide, REQUESTS, every_position=True)
    _, steps = record(tmp_path / "real.jsonl", narrow.replace("PRODUCT", wide), REQUESTS)
    prediction = simulate(every, cut)
    assert prediction.accepted == histogram(steps)
    assert prediction.steps == len(steps)


def test_real_steps_replay_between_floor_and_recording(tmp_path: Path) -> None:
    trace, _ = record(tmp_path / "run.jsonl", WIDE, REQUESTS)
    whole, cut = simulate(trace), simulate(trace, Cut(nodes=3))
    assert cut.steps == whole.steps
    assert 1 <= cut.floor < cut.mean_acceptance_length < whole.mean_acceptance_length
    assert 0 < cut.filled <= 1


def test_milliseconds_by_width(tmp_path: Path) -> None:
    trace, steps = record(tmp_path / "run.jsonl", WIDE, REQUESTS)
    table = tmp_path / "latency.csv"
    table.write_text("width,ms\n1,10\n31,40\n")
    latency = Latency.read(table)
    assert latency(16) == 25
    assert latency(32) is None
    prediction = simulate(trace, Cut(nodes=1), latency=latency)
    # plain decoding: one token in ten milliseconds
    assert prediction.tokens_per_second == pytest.approx(100.0)
    whole = simulate(trace, latency=latency)
    assert whole.ms == pytest.approx(sum(9 + step.tree.size for step in steps))
    (tmp_path / "latency.json").write_text('{"31": 40, "1": 10}')
    assert Latency.read(tmp_path / "latency.json") == latency
    narrow = Latency((1, 4), (1.0, 2.0))
    assert simulate(trace, latency=narrow).tokens_per_second is None
    own = Latency.of(trace)
    assert own(30) is not None


def test_a_recording_that_verified_nothing_has_no_latency(tmp_path: Path) -> None:
    every, _ = record(tmp_path / "every.jsonl", WIDE, REQUESTS[:1], every_position=True)
    assert Latency.of(every) is None


@pytest.mark.parametrize("text", ["", "word", "1,2,3\n", "{}", '{"1": "x"}', "0,3", "1,-2", "[1]"])
def test_broken_latency_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "table").write_text(text)
    with pytest.raises(FileError, match="not a latency table"):
        Latency.read(tmp_path / "table")
    with pytest.raises(FileError, match="cannot be read"):
        Latency.read(tmp_path / "missing")


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"depth": -1}, {"k": 0}, {"threshold": 1.0}])
def test_cuts_that_mean_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        Cut(**wrong)


def test_drafts_without_probabilities_have_no_best_nodes() -> None:
    tree = DraftTree.from_paths(9, [[1, 3], [1, 4], [2, 3], [2, 4]])
    assert Cut(k=1, depth=1)(tree).tokens.tolist() == [9, 1]
    for cut in (Cut(nodes=3), Cut(threshold=0.1)):
        with pytest.raises(CapabilityError, match="no probabilities"):
            cut(tree)


def test_ranked_nodes() -> None:
    fresh = Acceptance()
    assert Ranking(3)(TREE, fresh).tokens.tolist() == [9, 1, 3]
    assert Ranking(9)(TREE, fresh) is TREE
    # 0.90, 0.74, 0.33 and 0.14 tokens are expected of the draft nodes, so three of them pay where each costs 1 ms of 10
    assert Ranking(5, [10.0, 11.0, 12.0, 13.0, 14.0])(TREE, fresh).tokens.tolist() == [9, 1, 3, 5]
    assert Ranking(3, [10.0, 11.0, 12.0])(TREE, fresh).tokens.tolist() == [9, 1, 3]
    assert Ranking(5, [10.0, 20.0, 30.0, 40.0, 50.0])(TREE, fresh).tokens.tolist() == [9]
    # where streams have never been accepted, prompt lookup comes first
    wrong = Acceptance(expected={"stream 1": 200.0, "stream 2": 200.0})
    assert Ranking(2)(TREE, wrong).tokens.tolist() == [9, 2]


def test_recordings_of_several_methods_are_merged(tmp_path: Path) -> None:
    both = [record(tmp_path / f"{n}.jsonl", spec, REQUESTS, every_position=True)[0] for n, spec in enumerate(SPECS)]
    _, steps = record(tmp_path / "real.jsonl", "+".join(SPECS), REQUESTS)
    rows = [merged(parts, [Cut(nodes=12), Cut()]) for parts in zip(*(trace.rows() for trace in both), strict=True)]
    replayed = replay(rows, ranking=Ranking(12))
    assert (replayed.tokens, replayed.steps) == (Stats.of(steps).tokens, len(steps))
    assert replayed.accepted == histogram(steps)
