"""Predicted mean acceptance length is the decoded one, on answers that the target wrote itself."""

from __future__ import annotations

import pytest
import torch

from anabranch.drafting.replay import replay, replay_all
from anabranch.learning.examples import Batch, Example
from anabranch.methods.streams import objective as objective_module
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.objective import LossOptions, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from small import RICH, VOCABULARY, decode, request, small, small_adapter

PARENT = StreamConfig(num_streams=4, num_stream_layers=2, conditioning="parent", conditioning_rank=5)
TREES = {
    "tree": StreamSettings(nodes=12, k=4),
    "chain": StreamSettings(tree="chain"),
    "product": StreamSettings(tree="product", k=2),
    "blind": StreamSettings(nodes=12, k=4, condition=False),
}
REQUESTS = [request(n, n, 22, stop_ids=frozenset({2} if n % 2 else ())) for n in range(1, 11)]


# each config with one case in every run, their other combinations in the thorough one
@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, marks=() if (case, place) in {("llama", 0), ("gemma2", 1)} else pytest.mark.thorough)
        for case in ("llama", "gemma2", "gpt2")
        for place, config in enumerate((RICH, PARENT))
    ],
)
def test_predicted_is_decoded(case: str, config: StreamConfig) -> None:
    target = small(case)
    adapter = small_adapter(target, config, torch.arange(0, VOCABULARY, 2))
    answers, _ = decode(target, REQUESTS, rows=4)
    examples = [Example(tuple(r.prompt_ids), tuple(a), "toy") for r, a in zip(REQUESTS, answers, strict=True)]
    objective = StreamObjective(target, adapter, LossOptions(), segment=5)
    drafts = {name: StreamDraft(target, adapter, options) for name, options in TREES.items()}
    together, _ = replay_all(objective, drafts, examples, rows=3)
    for name, options in TREES.items():
        found, steps = decode(target, REQUESTS, StreamDrafter(target, adapter, options), rows=4)
        assert found == answers
        predicted = replay(objective, drafts[name], examples, rows=4)
        assert predicted.tokens == sum(map(len, answers))
        assert predicted.steps == sum(map(len, steps))
        assert predicted.mean_acceptance_length == predicted.tokens / predicted.steps
        assert together[name] == predicted
    tree = together["tree"]
    assert tree.mean_acceptance_length >= together["chain"].mean_acceptance_length > 1.0
    assert 1.0 >= tree.at_least(1) >= tree.at_least(2) >= tree.at_least(config.num_streams) >= 0.0
    assert tree.by_source["toy"][1] == tree.steps - len(examples)


def test_accuracy_by_stream_is_counted_as_the_loss_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective_module, "RIDING_STRIDE", 10**6)  # replay conditions all streams
    target = small()
    adapter = small_adapter(target, RICH, torch.arange(0, VOCABULARY, 2))
    answers, _ = decode(target, REQUESTS, rows=4)
    examples = [Example(tuple(r.prompt_ids), tuple(a)) for r, a in zip(REQUESTS, answers, strict=True)]
    objective = StreamObjective(target, adapter, LossOptions())
    right, count = torch.zeros(3), torch.zeros(3)
    of = Batch.of(examples)
    frozen = objective.freeze(of)
    for segment in objective.segments(of):
        scores = objective.loss(of, frozen, segment)
        right, count = right + scores.right_S, count + scores.count_S
    _, accuracy = replay_all(objective, {}, examples, top=4, rows=len(examples))
    assert accuracy.count_J.tolist() == count.tolist()
    assert accuracy.first_J.tolist() == right.tolist()
    first, among = accuracy.shares()
    assert all(a >= f for f, a in zip(first, among, strict=True))
    _, everything = replay_all(objective, {}, examples, top=VOCABULARY)
    assert everything.shares()[1] == [1.0] * 3
