"""Quantised self-speculation: tokens from a 4-bit copy of the target, alone and with streams that trail them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_kernels import BASE, adapter_for, decoder, in_four_bits, needs_kernels, packed, tokens

import small
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter
from anabranch.drafting.head import DraftHead
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import make_drafter, parse_spec
from anabranch.methods.none import NoDrafter
from anabranch.methods.quantized_draft.copy import COPY, Copied
from anabranch.methods.quantized_draft.drafter import QuantizedDrafter
from anabranch.methods.quantized_draft.entry import METHOD
from anabranch.methods.quantized_draft.lead import LEAD_ROWS, LeadCopy, LeadStreamDrafter, tree_behind
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import NativeDraft, StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.pack import pack_decoder, weight_bytes
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree

pytestmark = needs_kernels

SHAPE: dict[str, object] = {"conditioning": "path", "conditioning_rank": 32, "root_width": 32}
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def setup(form: str = "bfloat16") -> tuple[Decoder, StreamAdapter]:
    model = packed(BASE, form)
    return model, adapter_for(model, **SHAPE)


def decode(model: Decoder, drafter: Drafter, rows: int, sampling: SamplingParams | None = None) -> list[list[Step]]:
    asked = [Request(tokens(4 + 9 * i, i), 30, sampling=sampling or SamplingParams()) for i in range(rows)]
    return small.decode(model, asked, drafter, rows=rows, capacity=200)[1]


def said(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_a_lead_stands_between_the_root_and_the_streams_tree() -> None:
    """The example of ``tree_behind``."""
    below = DraftTree(
        np.array([8, 1, 4, 2], np.int64),
        np.array([-1, 0, 0, 1], np.int64),
        sources=("target", "stream 1", "stream 1", "stream 2"),
        log_probs=np.array([0.0, -0.5, -1.5, -0.75], np.float32),
    )
    tree = tree_behind(5, [7, 8], [-0.125, -0.25], below)
    assert tree.tokens.tolist() == [5, 7, 8, 1, 4, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2, 3]
    assert tree.sources == ("target", "quantized 1", "quantized 2", "stream 1", "stream 1", "stream 2")
    assert tree.log_probs.tolist() == [0.0, -0.125, -0.25, -0.75, -1.75, -1.0]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 2, LEAD_ROWS + 2])
def test_a_lead_changes_no_tokens(rows: int, sampling: SamplingParams) -> None:
    model, adapter = setup()
    plain = [said(steps) for steps in decode(model, NoDrafter(), rows, sampling)]
    for lead, nodes in ((None, 7), (1, 7), (3, 7), (2, 3), (2, 2)):
        drafter = LeadStreamDrafter(model, adapter, StreamSettings(nodes=nodes), tokens=lead)
        found = decode(model, drafter, rows, sampling)
        assert [said(steps) for steps in found] == plain
        leads = any(source.startswith(COPY) for steps in found for source in steps[1].tree.sources)
        assert leads == (lead is not None or rows <= LEAD_ROWS)
        assert max(step.tree.size for steps in found for step in steps) <= nodes


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_copy_of_weights_that_four_bits_hold_is_nearly_always_right(sampling: SamplingParams) -> None:
    model = decoder(BASE)
    adapter = adapter_for(model, num_stream_layers=1, attention_rank=0)
    in_four_bits(model, adapter)
    assert pack_decoder(model)
    (steps,) = decode(model, LeadStreamDrafter(model, adapter, StreamSettings(nodes=4), tokens=3), 1, sampling)
    whole = [step for step in steps if step.tree.size == 4]
    assert len(whole) > 3
    assert sum(len(step.verdict.path) - 1 for step in whole) / (3 * len(whole)) > 0.8


@pytest.mark.parametrize("certainty", [None, 10.0])
def test_certainty_scales_the_scores_of_greedy_rows(certainty: float | None) -> None:
    model, adapter = setup()
    head = DraftHead(model, adapter.vocabulary)
    native = NativeDraft(model, head, StreamSettings(tree="chain", depth=1), depth=1, certainty=certainty)
    state = torch.randn(1, BASE.hidden_size, generator=torch.Generator().manual_seed(3)).to(model.dtype)
    scores = head.scores(state)[0].float() * (certainty or 1.0)
    drafted = native.nodes(state, 1, None, None)
    assert drafted.tokens.item(1) == head.vocabulary[scores.argmax()]
    assert drafted.log_probs.item(1) == pytest.approx(float(scores.log_softmax(0).max()), abs=1e-3)


def test_one_pass_drafts_several_tokens_where_the_streams_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's trees have the right tokens behind wrong ones, so what it keeps in the cache has to be moved."""
    model = decoder(BASE)
    adapter = adapter_for(model, num_stream_layers=1, attention_rank=0)
    in_four_bits(model, adapter)
    assert pack_decoder(model)
    (plain,) = decode(model, NoDrafter(), 1)
    text = tokens(4, 0) + said(plain) + [0] * 20

    def right(lead: LeadCopy, rows: list[Copied], cache: Cache, most: int) -> list[DraftTree]:
        (row,) = rows
        at = cache.lengths[row.slot] + len(row.tokens) + 1
        first, second = text[at : at + 2]
        drafted = np.array([row.latest, (first + 1) % 50, first, (second + 1) % 50, second], np.int64)
        return [DraftTree(drafted, np.array([-1, 0, 0, 2, 2], np.int64))]

    monkeypatch.setattr(LeadCopy, "_trees", right)
    (found,) = decode(model, LeadStreamDrafter(model, adapter, StreamSettings(nodes=7), tokens=4), 1)
    assert said(found) == said(plain)
    whole = [step for step in found if step.tree.size == 7]
    leads = [sum(source.startswith(COPY) for source in step.tree.sources) for step in whole]
    assert len(whole) > 3
    assert max(leads) > 4
    taken = sum(min(len(step.verdict.path) - 1, lead) for step, lead in zip(whole, leads, strict=True))
    assert taken / sum(leads) > 0.8


@pytest.mark.parametrize(("lead", "nodes"), [(1, 4), (8, 12)])
def test_a_lead_may_reach_the_end_of_the_context(lead: int, nodes: int) -> None:
    model = packed(replace(BASE, max_positions=48), "bfloat16")
    drafter = LeadStreamDrafter(model, adapter_for(model, **SHAPE), StreamSettings(nodes=nodes), tokens=lead)
    engine = Engine(model, drafter, rows=1, capacity=48)
    engine.add(Request(tokens(8), 40))
    assert sum(len(step.tokens) for step in engine.run()) == 40


def test_rejection_judges_no_drafts_of_a_copy() -> None:
    model, adapter = setup()
    streams = LeadStreamDrafter(model, adapter, StreamSettings(tree="chain"))
    for drafter in (streams, QuantizedDrafter(model, 3)):
        with pytest.raises(CapabilityError, match="use rule='match'"):
            drafter.check(SAMPLED, "rejection")
    StreamDrafter(model, adapter, StreamSettings(tree="chain")).check(SAMPLED, "rejection")


@pytest.mark.parametrize("form", ["float32", "int8", "int4"])
def test_there_is_no_copy_where_four_bits_read_no_less(form: str) -> None:
    model, adapter = setup(form)
    for spec in ("streams+quantized_draft", "quantized_draft"):
        with pytest.raises(CapabilityError, match="bf16 weights"):
            make_drafter(spec, model, adapter)


def test_trees_that_a_copy_cannot_lead_are_refused() -> None:
    model, adapter = setup()
    for settings in ("tree=product,k=2", "placement=ride", "prune=4"):
        with pytest.raises(CapabilityError, match="trail on them without pruning, with tree=best or tree=chain"):
            make_drafter(f"streams:{settings}+quantized_draft", model, adapter)


@pytest.mark.parametrize("tokens", ["9", "0", "-1", "two"])
def test_the_setting_is_a_small_number_or_auto(tokens: str) -> None:
    with pytest.raises(InputError, match="tokens must be a whole number from 1 to 8, or auto"):
        METHOD.settings.parse(f"tokens={tokens}", "quantized_draft")
    assert str(parse_spec("streams:tree=8+quantized_draft:tokens=2")) == "streams:nodes=8+quantized_draft:tokens=2"


def test_auto_drafts_with_no_copy_of_the_target() -> None:
    model, adapter = setup()
    assert make_drafter("auto", model, adapter).spec == "streams:tree=auto,copy=yes+prompt_lookup:tokens=auto"


def test_streams_alone_have_no_copy_and_copy_nothing() -> None:
    model, adapter = setup()
    drafter = make_drafter("streams:tree=8", model, adapter)
    assert type(drafter) is StreamDrafter
    assert not drafter.tree.settings.copy
    (steps,) = decode(model, drafter, 1)
    calls = Stats.of(steps).calls
    layers, streams = BASE.num_layers, len(adapter.layers)
    assert set(calls) == {("target", layers, layers), ("partial", streams, layers)}
    assert calls["partial", streams, layers] <= len(steps)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("spec", ["quantized_draft:tokens=3", "quantized_draft", "prompt_lookup+quantized_draft"])
def test_a_copy_alone_changes_no_tokens(spec: str, rows: int, sampling: SamplingParams) -> None:
    model = packed(BASE, "bfloat16")
    plain = [said(steps) for steps in decode(model, NoDrafter(), rows, sampling)]
    found = decode(model, make_drafter(spec, model), rows, sampling)
    assert [said(steps) for steps in found] == plain
    if spec.endswith("=3"):
        sources = {source for steps in found for step in steps for source in step.sources}
        assert sources <= {"target", "quantized 1", "quantized 2", "quantized 3"}
        assert max(step.tree.size for steps in found for step in steps) == 4


def test_every_pass_of_the_copy_and_of_the_streams_is_counted() -> None:
    model, adapter = setup()
    layers, streams = BASE.num_layers, len(adapter.layers)
    (steps,) = decode(model, make_drafter("quantized_draft:tokens=2", model), 1)
    stats = Stats.of(steps)
    assert stats.calls["copy", layers, layers] == 2 * (stats.steps - 1)  # nothing is drafted after the last step
    (steps,) = decode(model, make_drafter("streams:tree=8+quantized_draft", model, adapter), 1)
    stats = Stats.of(steps)
    ran = stats.calls["copy", layers, layers]
    assert 0 < ran <= stats.steps
    assert stats.calls["partial", streams, layers] >= ran
    assert stats.draft_calls == ran + stats.calls["partial", streams, layers]
    assert stats.bytes_read > stats.steps * weight_bytes(model)


def test_the_copy_is_made_once() -> None:
    model, adapter = setup()
    first, second = (LeadStreamDrafter(model, adapter, tokens=tokens) for tokens in (1, 2))
    alone = QuantizedDrafter(model, 2)
    assert first.copy._stack is second.copy._stack is alone.copy._stack
