"""Layers with a recurrent state: a rejected draft leaves nothing behind, whoever drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from anabranch.decoding.engine import Engine
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import CapabilityError
from anabranch.methods import make_drafter
from anabranch.methods.draft_model.drafter import DraftModelDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.tuning import check_weights
from anabranch.model.config import DeltaConfig
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.lora import places
from anabranch.model.pack import pack_decoder
from anabranch.model.quantize import quantize_decoder
from anabranch.model.recurrent import Ancestry
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import LLAMA, RICH, decode, logits_of, new_cache, prompt, randomise, request, small

DELTA = DeltaConfig((True, False, True), key_heads=2, heads=4, key_dim=8, value_dim=8, width=3)
HYBRID = replace(LLAMA, hidden_size=64, intermediate_size=96, recurrent=DELTA, attention_gate=True)


def target(dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = build_decoder(HYBRID, device="cpu")
    randomise(decoder, seed=3)
    return decoder.to(dtype)


def test_ancestry_as_drawn() -> None:
    order = Ancestry(np.array([[-1, 0, 0, 1]]), 3)
    assert order.windows_BNW.tolist() == [[[0, 1, 2], [1, 2, 3], [1, 2, 4], [2, 3, 5]]]
    depths = [(nodes.tolist(), above.tolist()) for nodes, above in order.depths]
    assert depths == [([0], [0]), ([1, 2], [0, 0]), ([3], [0])]


@pytest.mark.parametrize("path", [[0], [0, 2, 5], [0, 1, 4, 6]])
def test_the_committed_state_is_that_of_the_path_alone(path: list[int]) -> None:
    """Return whether the path ends at the deepest nodes or above them; until then, no state changes."""
    decoder, tree = target(), DraftTree(np.array(prompt(7, 5)), np.array([-1, 0, 0, 1, 1, 2, 4]))
    cache, alone = new_cache(decoder, rows=2), new_cache(decoder)
    for slot in range(2):
        decoder(Inputs.of_prompt(prompt(9)), cache, slots=slice(slot, slot + 1))
        cache.commit([range(9)])
    decoder(Inputs.of_prompt(prompt(9)), alone)
    alone.commit([range(9)])
    before = {layer: part[1].clone() for layer, part in cache.states.matrices.items()}
    decoder(Inputs.of_trees([tree, DraftTree.root(3)]), cache)
    assert all(torch.equal(part[1], before[layer]) for layer, part in cache.states.matrices.items())
    cache.commit([path, [0]])
    for node in path:
        decoder(Inputs.of_trees([DraftTree.root(int(tree.tokens[node]))]), alone)
        alone.commit([[0]])
    for kind in ("inputs", "matrices"):
        for layer, part in getattr(cache.states, kind).items():
            torch.testing.assert_close(part[0], getattr(alone.states, kind)[layer][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *(("prompt_lookup:tokens=4", 0.0), ("lookahead", 0.0), ("draft_model", 0.0), ("prompt_lookup+suffix", 1.0)),
        *(
            pytest.param(name, temperature, marks=pytest.mark.thorough)
            for name, temperature in (("suffix", 0.0), ("suffix", 1.0), ("prompt_lookup+suffix", 0.0))
        ),
        *(
            pytest.param(name, 1.0, marks=pytest.mark.thorough)
            for name in ("prompt_lookup:tokens=4", "lookahead", "draft_model")
        ),
    ],
)
def test_drafts_change_nothing(name: str, temperature: float) -> None:
    """With rows that join and leave."""
    decoder, sampling = target(), SamplingParams(temperature=temperature)
    asked = [request(5 + 3 * i, i, 14 + 3 * i, sampling=sampling) for i in range(4)]
    plain, _ = decode(decoder, asked)
    for rows in (1, 3):
        drafter = DraftModelDrafter(decoder, small()) if name == "draft_model" else make_drafter(name, decoder)
        drafted, steps = decode(decoder, asked, drafter, rows=rows)
        assert drafted == plain
        assert any(step.tree.size > 1 for row in steps for step in row)


def test_cancelled_rows_leave_the_others_as_they_are() -> None:
    decoder = target()
    asked = [request(6 + i, i, 16) for i in range(3)]
    plain, _ = decode(decoder, asked)
    engine = Engine(decoder, make_drafter("prompt_lookup:tokens=4", decoder), rows=3, capacity=96)
    keys = [engine.add(each) for each in asked]
    said: dict[int, list[int]] = {key: [] for key in keys}
    for count in range(64):
        if count == 3:
            engine.remove(keys[0])
        for step in engine.step() if engine.active else []:
            said[step.row] += step.tokens
    assert said[keys[0]] == plain[0][: len(said[keys[0]])]
    assert [said[key] for key in keys[1:]] == plain[1:]


def test_prompts_that_are_read_in_turn_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.decoding.ticks.CHUNK", 8)
    monkeypatch.setattr("anabranch.decoding.ticks.SHARED_CHUNK", 8)
    decoder = target()
    asked = [request(count, i, 14) for i, count in enumerate((40, 25, 9))]
    scheduler, drafter = Scheduler(decoder, rows=3), make_drafter("suffix", decoder)
    tickets = []
    for each in asked:
        tickets.append(scheduler.submit(each, drafter))
        scheduler.tick()
    while scheduler.busy:
        scheduler.tick()
    assert [ticket.emitted for ticket in tickets] == decode(decoder, asked)[0]


def test_a_beginning_that_another_text_shares_is_read_again() -> None:
    """The state is that of a whole text, so no part of it is copied."""
    decoder, ids = target(), prompt(40)
    asked = [replace(request(1, 0, 8), prompt_ids=[*ids, *prompt(5, seed)]) for seed in (1, 2, 3)]
    plain, _ = decode(decoder, asked)
    scheduler, drafter = Scheduler(decoder, rows=2), make_drafter("suffix", decoder)
    found = []
    for each in asked:
        steps = scheduler.steps(scheduler.submit(each, drafter))
        found.append([token for step in steps for token in step.tokens])
    assert found == plain


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_kernels_multiply_its_weights(quantize: str) -> None:
    dtype = torch.float32 if quantize == "none" else torch.bfloat16
    plain, fast = target(dtype), target(dtype)
    for decoder in (plain, fast):
        quantize_decoder(decoder, quantize)
    assert pack_decoder(fast)
    ids = Inputs.of_prompt(prompt(12))
    ours, theirs = logits_of(fast(ids, new_cache(fast))).float(), logits_of(plain(ids, new_cache(plain))).float()
    assert (ours - theirs).abs().mean() / theirs.std() < (1e-5 if quantize == "none" else 0.3)


def test_what_needs_other_layers_is_refused_by_name() -> None:
    decoder = target()
    with pytest.raises(CapabilityError, match="streams need layers of attention and an MLP"):
        StreamAdapter(HYBRID, RICH)
    with pytest.raises(CapabilityError, match="cannot be a draft model: its recurrent state cannot go back"):
        DraftModelDrafter(small(), decoder)
    with pytest.raises(CapabilityError, match="llama models cannot be tuned"):
        check_weights(decoder)


def test_loras_are_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match="llama models take no LoRA"):
        places(HYBRID)
