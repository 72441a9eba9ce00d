"""Recordings of toy decodings match their steps; broken files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anabranch.analysis.trace import Trace, TraceWriter, child_ranks, read_trace
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.errors import CapabilityError, FileError
from anabranch.methods import make_drafter
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Rule
from small import request, small, small_adapter

SAMPLED = SamplingParams(temperature=1.0, seed=3)


def record(
    path: Path, spec: str, requests: list[Request], *, every_position: bool = False, rule: Rule = "match"
) -> tuple[Trace, list[Step]]:
    """Decode all requests together and record; returns the recording and the steps in the order of decoding."""
    target = small()
    with TraceWriter(path, settings={"drafter": spec}, rule=rule, every_position=every_position) as writer:
        drafter = writer.watch(make_drafter(spec, target, small_adapter(target)), target)
        engine = Engine(target, drafter, rows=len(requests), capacity=96)
        for each in requests:
            engine.add(each)
        steps = list(engine.run())
        for step in steps:
            writer.add(step)
    return read_trace(path), steps


@pytest.mark.parametrize("spec", ["none", "prompt_lookup", "streams:nodes=12", "streams:nodes=12,prune=6"])
def test_a_recording_holds_what_happened(tmp_path: Path, spec: str) -> None:
    requests = [request(9, seed=1), request(6, seed=2, new=11)]
    trace, steps = record(tmp_path / "run.jsonl", spec, requests)
    records = list(trace)
    assert trace.settings == {"drafter": spec}
    assert len(records) == len(steps)
    for stored, step in zip(records, steps, strict=True):
        for name in ("row", "verdict", "tokens", "finish", "drafted"):
            assert getattr(stored, name) == getattr(step, name)
        assert stored.timings.total == pytest.approx(step.timings.total, abs=1e-6)
        assert stored.tree.tokens.tolist() == step.tree.tokens.tolist()
        assert stored.tree.parents.tolist() == step.tree.parents.tolist()
        assert stored.tree.sources == step.tree.sources
        assert np.array_equal(stored.tree.log_probs, step.tree.log_probs)  # to the bit
        assert len(stored.ranks) == stored.verdict.accepted
    for row in trace.rows():
        own = [step for step in steps if step.row == row.records[0].row]
        assert row.tokens == tuple(token for step in own for token in step.tokens)
        starts = np.cumsum([0] + [len(step.tokens) for step in own])[:-1]
        assert [r.at for r in row.records] == starts.tolist()


def test_p_and_q_are_those_of_the_rule(tmp_path: Path) -> None:
    requests = [request(8, seed=4, sampling=SAMPLED, rule="rejection", new=30)]
    trace, steps = record(tmp_path / "run.jsonl", "streams:tree=product,k=2", requests, rule="rejection")
    assert sum(found.judged is not None for found in trace) > 3
    for found, step in zip(trace, steps, strict=True):
        if found.judged is None:
            assert step.tree.size == 1
            continue
        q = step.tree.draft_probs
        expected = [float(q[parent, token]) for parent, token in zip(step.tree.parents, step.tree.tokens, strict=True)]
        assert found.judged.q == pytest.approx(expected[1:])
        inner = [node for node in found.verdict.path if step.tree.children(node)]
        assert len(found.judged.overlap) == len(inner)
        assert all(0 < value <= 1 + 1e-6 for value in found.judged.overlap)
        for node, overlap in zip(inner, found.judged.overlap, strict=True):
            for child in step.tree.children(node):
                # the overlap is a sum over all tokens, the child's among them
                assert overlap >= min(found.judged.p[child - 1], found.judged.q[child - 1]) - 1e-6


def test_every_position_has_the_draft_that_would_be_made_there(tmp_path: Path) -> None:
    requests = [request(9, seed=1), request(7, seed=5)]
    every, plain = record(tmp_path / "every.jsonl", "streams:nodes=12", requests, every_position=True)
    assert all(step.tree.size == 1 and len(step.tokens) == 1 for step in plain)
    steps, _ = record(tmp_path / "steps.jsonl", "streams:nodes=12", requests)
    for row, real in zip(every.rows(), steps.rows(), strict=True):
        assert row.tokens == real.tokens
        assert [r.at for r in row.records] == list(range(len(row.tokens)))
        at = {r.at: r for r in row.records}
        for stored in real.records:
            whole, depth = at[stored.at].tree, at[stored.at].max_depth
            tree = whole.select((whole.depths <= depth).nonzero()[0])  # near the end a draft is cut
            assert tree.tokens.tolist() == stored.tree.tokens.tolist()
            assert tree.parents.tolist() == stored.tree.parents.tolist()


def test_unverified_drafts_and_reject_do_not_go_together(tmp_path: Path) -> None:
    asked = [request(8, seed=4, sampling=SAMPLED, rule="rejection")]
    with pytest.raises(CapabilityError, match="every position"):
        record(tmp_path / "run.jsonl", "streams:tree=chain", asked, every_position=True)


def test_ranks() -> None:
    log_probs = [[-0.7, -0.8], [-0.7, -1.6], [-0.5, -0.6]]
    ranked = DraftTree.from_paths(9, [[1, 3], [1, 4], [2, 3]], log_probs=log_probs)
    assert child_ranks(ranked, (0, 1, 3)) == (1, 1)
    assert child_ranks(ranked, (0, 4)) == (0,)
    assert child_ranks(ranked, (0,)) == ()
    assert child_ranks(DraftTree.from_paths(9, [[1], [2]]), (0, 2)) == (1,)


@pytest.mark.parametrize("log_probs", [[float("-inf")], None], ids=["impossible", "unknown"])
def test_probabilities_of_nodes_survive(log_probs: list[float] | None, tmp_path: Path) -> None:
    step = next(iter(record(tmp_path / "run.jsonl", "none", [request(5, seed=1, new=1)])[1]))
    tree = DraftTree.chain(3, [4], log_probs=log_probs)
    with TraceWriter(tmp_path / "other.jsonl", settings={}) as writer:
        writer.add(Step(0, step.tokens, step.sources, tree, 1, step.verdict, step.timings))
    (stored,) = read_trace(tmp_path / "other.jsonl")
    assert (None if stored.tree.log_probs is None else stored.tree.log_probs.tolist()) == (
        log_probs and [0.0, *log_probs]
    )


def test_a_cut_off_last_record_is_left_out(tmp_path: Path) -> None:
    trace, steps = record(tmp_path / "run.jsonl", "streams:nodes=8", [request(9, seed=1)])
    text = trace.path.read_text()
    trace.path.write_text(text[:-20])
    with pytest.warns(UserWarning, match="is incomplete and was skipped"):
        assert len(list(trace)) == len(steps) - 1
    lines = text.splitlines(keepends=True)
    trace.path.write_text("".join([*lines[:-2], lines[-2][:30] + "\n", lines[-1]]))
    with pytest.raises(FileError, match=f"line {len(lines) - 1} .* is not JSON"):
        list(trace)
    trace.path.write_text("".join([*lines[:-1], json.dumps({"row": 0}) + "\n"]))
    with pytest.raises(FileError, match="not a step"):
        list(trace)


def test_every_step_is_in_the_file_at_once(tmp_path: Path) -> None:
    """A process that is killed leaves what it wrote."""
    engine = Engine(small(), make_drafter("prompt_lookup", small()))
    engine.add(request(9, seed=1))
    with TraceWriter(tmp_path / "run.jsonl", settings={}) as writer:
        for count, step in enumerate(engine.run(), start=1):
            writer.add(step)
            assert len(list(read_trace(tmp_path / "run.jsonl"))) == count


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    for text in ("", "word", "{}", "[1]"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(FileError, match="is not a trace"):
            read_trace(tmp_path / "other")
    (tmp_path / "later").write_text('{"trace": 99, "every_position": false, "settings": {}}\n')
    with pytest.raises(FileError, match="version 99"):
        read_trace(tmp_path / "later")
    with pytest.raises(FileError, match="exists"):
        TraceWriter(tmp_path / "later", settings={})
    with pytest.raises(FileError, match="cannot be written"):
        TraceWriter(tmp_path / "later" / "below", settings={})
