"""Streams on a decoder that attends to a source: the same in training and in decoding, and lossless. Toy size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from anabranch.methods.streams.config import StreamConfig
from pairs import Pair
from test_encoder_decoder import packed
from torch import Tensor

from anabranch.certify.draws import sampling_scheduler
from anabranch.decoding.engine import Request
from anabranch.drafting.drafter import Drafter, Observation, Row
from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.objective import StreamObjective
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from anabranch.verify import Verdict
from small import RICH, randomise

FAMILIES = ("t5", "bart", "whisper")
MAKERS = [pytest.param(Pair, id="torch")]
MAKERS.append(
    pytest.param(packed, id="native", marks=pytest.mark.skipif(native.library() is None, reason="no kernels"))
)
LENGTHS = (5, 17, 2)  # of sources


def adapter_of(target: Decoder, shape: StreamConfig = replace(RICH, pruning_rank=0)) -> StreamAdapter:
    adapter = StreamAdapter(target.config, shape)
    randomise(adapter, seed=5, scale=0.1)
    return adapter.eval().requires_grad_(False)


def sources(pair: Pair) -> list[Source]:
    return [pair.source(length, seed=length) for length in LENGTHS]


def decoded_states(pair: Pair, adapter: StreamAdapter, read: list[Source], texts: list[list[int]]) -> list[Tensor]:
    """The states of streams that trail the last token but one of each text, as the drafter computes them."""
    target, drafter = pair.decoder, StreamDrafter(pair.decoder, adapter)
    rows = [Row(text, 1, SamplingParams(), max_depth=3) for text in texts]
    for row in rows:
        drafter.join(row)
    cache = target.new_cache(len(rows), 64)
    with torch.inference_mode():
        for slot, (source, text) in enumerate(zip(read, texts, strict=True)):
            cache.add_row(1, target.encode(source))
            if len(text) > 2:
                target(Inputs.of_prompt(text[:-2]), cache, slots=slice(slot, slot + 1), need="keys")
                cache.commit([range(len(text) - 2)])
        last = Inputs.of_chains(torch.tensor([text[-2:-1] for text in texts]).numpy())
        result = target(last, cache, taps=drafter.needs.layers, need="hidden")
        cache.commit([[0]] * len(rows))
        verdicts = [Verdict((0,), text[-1]) for text in texts]
        trees = [DraftTree.root(text[-2]) for text in texts]
        seen = Observation(result, cache, [*range(len(rows))], trees, verdicts, [True] * len(rows), 8)
        drafter.observe(rows, seen)
    states = [row.state[drafter].states_SD for row in rows]
    assert all(each is not None for each in states)
    return states


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_decoding_compute_the_same_streams(family: str, make: type[Pair]) -> None:
    """Over ragged sources and texts; the source matters, and each row has its own."""
    pair, plain = make(family), Pair(family, **({} if make is Pair else make(family).fields))
    adapter = adapter_of(plain.decoder)
    texts = [pair.text(length, seed=length) for length in (7, 3, 12)]
    read = sources(pair)
    examples = [Example((text[0],), tuple(text[1:]), encoded=source) for text, source in zip(texts, read, strict=True)]
    objective, batch = StreamObjective(plain.decoder, adapter), Batch.of(examples)
    with torch.no_grad():
        at = torch.tensor([[len(text) - 2] for text in texts])
        trained = objective.states(objective.freeze(batch), batch.tokens_BT, at)[:, 0]
    found = decoded_states(pair, adapter, read, texts)
    for ours, theirs in zip(found, trained, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-3 * float(theirs.std()))
    swapped = decoded_states(pair, adapter, read[::-1], texts)
    assert float((swapped[0] - found[0]).abs().max()) > 0.05 * float(found[0].std())


def target_of(pair: Pair) -> Target:
    return Target(pair.decoder, None, pair.decoder.config, "toy", None, "0" * 64, "none")


def emitted(pair: Pair, drafter: Drafter, **sampling: float) -> tuple[list[list[int]], int]:
    """The texts of six requests, of which three are decoded at a time: rows join and leave; and accepted drafts."""
    scheduler, tickets = sampling_scheduler(target_of(pair), 3), []
    for seed in range(6):
        source, params = pair.source(2 + 3 * seed, seed=seed), SamplingParams(seed=seed, **sampling)
        request = Request([pair.start], 9 + 3 * seed, params, source=source)
        tickets.append(scheduler.submit(request, drafter))
    accepted, texts = 0, {ticket: list[int]() for ticket in tickets}
    while scheduler.busy:
        for ticket, step in scheduler.tick():
            texts[ticket] += step.tokens
            accepted += len(step.tokens) - 1
    return list(texts.values()), accepted


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_change_no_token(family: str, make: type[Pair]) -> None:
    """Greedy and sampled, with sources of their own lengths in one batch."""
    pair = make(family)
    drafter = StreamDrafter(pair.decoder, adapter_of(pair.decoder), StreamSettings(nodes=6))
    for sampling in ({}, {"temperature": 1.5}):
        plain, _ = emitted(pair, NoDrafter(), **sampling)
        drafted, accepted = emitted(pair, drafter, **sampling)
        assert drafted == plain
        assert accepted > 0 or not sampling, "untrained streams guess some of 97 tokens"


def test_what_does_not_fit_is_refused() -> None:
    target = Pair("t5").decoder
    pruned = adapter_of(target, RICH)
    for settings in (StreamSettings(placement="ride"), StreamSettings(prune=4)):
        with pytest.raises(CapabilityError, match="streams trail the passes of encoder-decoder models, unpruned and"):
            StreamDrafter(target, pruned, settings)
