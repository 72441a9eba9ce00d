"""Rotations that depend on the length of a text: what is decoded equals transformers', however it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from toys import toy_hf

from anabranch.decoding import ticks as module
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler, Ticket
from anabranch.drafting.drafter import Drafter, Row
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import run_frozen
from anabranch.methods.none import NoDrafter
from anabranch.methods.prompt_lookup import PromptLookupDrafter
from anabranch.methods.tuning import TextPass
from anabranch.model.backends import GraphBackend
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.graphs import Compute, Outputs
from anabranch.model.inputs import Inputs
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import fill_decoder
from anabranch.native import library as native
from anabranch.tree import DraftTree
from small import new_cache

ORIGINAL = 32
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)], "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **FACTORS}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "longrope, read again": ("phi3", {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE}),
}
# prompts and new tokens: short of the original length, up to it, beyond it by one and by many, from beyond it
RUNS = ((5, 6), (20, 12), (20, 13), (31, 3), (32, 4), (33, 6), (9, 60), (50, 20))
needs_kernels = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")


def text(length: int, seed: int = 0) -> list[int]:
    """Token ids with a period, so that prompt lookup drafts from the start."""
    drawn = torch.randint(3, 97, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (drawn * length)[:length]


@cache
def toy(kind: str) -> Any:
    return toy_hf(KINDS[kind][0], {**SIZES, **KINDS[kind][1]})


@cache
def ours(kind: str, *, packed: bool = False) -> Decoder:
    theirs = toy(kind)
    config = model_config(theirs.config.to_dict())
    made, _ = fill_decoder(config, theirs.state_dict(), dtype=torch.float32, device=torch.device("cpu"))
    assert not packed or pack_decoder(made)
    return made


def forgetful(model: Any) -> Any:
    """transformers' rotations remember the longest text so far."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@cache
def theirs(kind: str, length: int, new: int, seed: int = 0) -> list[int]:
    model, given = forgetful(toy(kind)), torch.tensor([text(length, seed)])
    found = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
    return found[0, length:].tolist()


class Known(Drafter):
    """Trees of the next tokens of known texts, each with a wrong sibling, as deep as allowed."""

    name, rules, max_nodes = "known", ("match",), 13

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        found = []
        for row in rows:
            whole = next(t for t in self.texts if list(t[: len(row.tokens)]) == row.tokens)
            ahead = whole[len(row.tokens) :][: min(6, row.max_depth)]
            tokens, parents, last = [row.root], [-1], 0
            for token in ahead:
                tokens += [(token + 1) % 97, token]
                parents += [last, last]
                last = len(tokens) - 1
            found.append(DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64)))
        return found


def decoded(scheduler: Scheduler, runs: Sequence[tuple[int, int]], drafter: Drafter) -> list[Ticket]:
    tickets = [scheduler.submit(Request(text(length), new), drafter) for length, new in runs]
    while scheduler.busy:
        scheduler.tick()
    return tickets


def drafters(kind: str) -> list[Drafter]:
    texts = [text(length) + theirs(kind, length, new) for length, new in RUNS]
    return [NoDrafter(), PromptLookupDrafter(), Known(sorted(texts, key=len, reverse=True))]


def test_the_rotations_matter() -> None:
    """Otherwise nothing here would show anything."""
    for kind in KINDS:
        short = toy_hf("llama", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
        short.load_state_dict(toy("dynamic").state_dict())
        if KINDS[kind][0] == "llama":
            given = torch.tensor([text(50)])
            plain = short.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False)
            assert plain[0, 50:].tolist() != theirs(kind, 50, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_kernels)], ids=["pytorch", "native"])
def test_one_row_at_a_time_and_several_together(kind: str, packed: bool) -> None:
    target = ours(kind, packed=packed)
    for drafter in drafters(kind):
        for rows in (1, 3):
            found = decoded(Scheduler(target, rows=rows), RUNS, drafter)
            for run, ticket in zip(RUNS, found, strict=True):
                assert ticket.error is None
                assert ticket.emitted == theirs(kind, *run), (drafter.name, rows, run)
        if isinstance(drafter, Known):
            steps = [len(ticket.steps) for ticket in found]
            assert steps[6] < 60 / 4, "drafts were accepted"


@needs_kernels
def test_a_context_without_bound_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, places = list[int](), Decoder.places

    def counted(target: Decoder, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        listed.append(len(positions))
        return places(target, positions, dtype)

    monkeypatch.setattr(Decoder, "places", counted)
    ours.__wrapped__("dynamic", packed=True)
    assert listed
    assert max(listed) < 1000


def captured(compute: Compute, inputs: tuple[torch.Tensor, ...]) -> tuple[Callable[[], None], Outputs]:
    """A graph as far as a CPU has them: computed anew at the addresses of the first time."""
    outputs = tuple(output.clone() for output in compute(*inputs))

    def replay() -> None:
        for to, output in zip(outputs, compute(*inputs), strict=True):
            to.copy_(output)

    return replay, outputs


@pytest.mark.parametrize("kind", KINDS)
def test_passes_of_fixed_shapes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ours(kind)
    monkeypatch.setattr(target, "backend", GraphBackend(captured))
    found = decoded(Scheduler(target, rows=3), RUNS, PromptLookupDrafter())
    assert [ticket.emitted for ticket in found] == [theirs(kind, *run) for run in RUNS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_kernels)], ids=["pytorch", "native"])
def test_kept_texts_are_reused_where_their_rotations_are_the_same(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHORTEST", 4)
    scheduler = Scheduler(ours(kind, packed=packed))
    reused = {}
    for run in (*RUNS, *RUNS, (60, 8)):
        (ticket,) = decoded(scheduler, [run], PromptLookupDrafter())
        assert ticket.emitted == theirs(kind, *run), run
        reused[run] = ticket.reused
    assert reused[20, 13] > 15
    assert reused[50, 20] > 45, "the same prompt again"
    # dynamic scaling rotates a longer prompt otherwise from its first token on
    assert (reused[60, 8] > 0) == (kind != "dynamic")


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_read_in_chunks_and_in_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    monkeypatch.setattr(module, "SHARED_CHUNK", 5)
    monkeypatch.setattr("anabranch.decoding.batch.CHUNK", 6)
    found = decoded(Scheduler(ours(kind), rows=4), RUNS[::-1], PromptLookupDrafter())
    assert [ticket.emitted for ticket in found] == [theirs(kind, *run) for run in RUNS[::-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_lost_its_row_goes_on(kind: str) -> None:
    """Emitted tokens are read again like a prompt, with the rotations that they had."""
    scheduler = Scheduler(ours(kind), rows=2, prefix_bytes=0)
    tickets = [scheduler.submit(Request(text(length), new), NoDrafter()) for length, new in RUNS]
    for count in range(200):
        scheduler.tick()
        if count % 9 == 8 and scheduler.engine is not None and scheduler.busy:
            scheduler._fail(KeyboardInterrupt())
    assert [ticket.emitted for ticket in tickets] == [theirs(kind, *run) for run in RUNS]


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_a_text_as_transformers_does(kind: str) -> None:
    target, ids = ours(kind), torch.tensor([text(50)])
    with torch.no_grad():
        expected = forgetful(toy(kind))(input_ids=ids, use_cache=False).logits[0]
        whole = TextPass(target, ids)
        x = target.embed(ids, whole.positions_BT)
        for index, block in enumerate(target.blocks):
            x = block(x, *whole.rotations, lambda q, k, v, i=index: whole.attend(i, q, k, v))
        torch.testing.assert_close(target.logits(target.normed(x))[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_kernels)], ids=["pytorch", "native"])
def test_drafters_learn_from_states_as_they_are_decoded(kind: str, packed: bool) -> None:
    """Prompts of different lengths share a batch."""
    target = ours(kind, packed=packed)
    parts = [(text(length), theirs(kind, length, new)) for length, new in RUNS]
    batch = Batch.of([Example(tuple(prompt), tuple(answer)) for prompt, answer in parts])
    hidden_BTD = run_frozen(target, batch).hidden_BTD
    for (prompt, answer), hidden_TD in zip(parts, hidden_BTD, strict=True):
        again = target.rope().reread_after
        memory = new_cache(
            target,
            capacity=96,
            prompt=len(prompt) if again is None else target.rope().prompt(len(prompt), len(prompt + answer)),
        )
        with torch.no_grad():
            for piece in (prompt, *([token] for token in answer)):
                found = target(Inputs.of_prompt(piece), memory, need="hidden").hidden_MD
                at = memory.lengths[0]
                torch.testing.assert_close(hidden_TD[at : at + len(piece)], found, rtol=0, atol=1e-4)
                memory.commit([range(len(piece))])
