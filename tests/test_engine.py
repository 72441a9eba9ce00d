"""Guarantees of the loop for every drafter: drafts change the speed and never the text. Float32, toy size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.decoding.batch import CHUNK
from anabranch.decoding.engine import Engine, Request
from anabranch.drafting.combined import CombinedDrafter
from anabranch.drafting.drafter import Drafter, Row, altered
from anabranch.errors import AnabranchError, CapabilityError, InputError, NumericsError
from anabranch.methods.lookahead import LookaheadDrafter, LookaheadSettings
from anabranch.methods.none import NoDrafter
from anabranch.methods.prompt_lookup import LookupSettings, PromptLookupDrafter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.suffix import SuffixDrafter, SuffixSettings
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.weights import build_decoder
from anabranch.sampling import SamplingParams, log_probs
from anabranch.tree import DraftTree
from small import (
    CASES,
    LLAMA,
    RICH,
    SOME_CASES,
    VOCABULARY,
    Oracle,
    decode,
    new_cache,
    plain,
    prompt,
    randomise,
    request,
    small,
    small_adapter,
)

BEST = StreamSettings(nodes=10, k=4)
FREQUENT = torch.arange(0, VOCABULARY, 2)


def streams(target: Decoder, **options: object) -> StreamDrafter:
    tree = options.pop("tree", BEST)
    return StreamDrafter(target, small_adapter(target), replace(tree, **options))


DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "prompt_lookup": lambda target: PromptLookupDrafter(LookupSettings(tokens="5")),
    "matches": lambda target: PromptLookupDrafter(LookupSettings(tokens="5", matches=3)),
    "suffix": lambda target: SuffixDrafter(SuffixSettings(threshold=0.0)),
    "lookahead": lambda target: LookaheadDrafter(LookaheadSettings(window=4, ngram=4, guesses=4)),
    "ride": lambda target: streams(target, placement="ride"),
    "trail": lambda target: streams(target, placement="trail"),
    "pruned-ride": lambda target: streams(target, placement="ride", prune=5),
    "pruned-trail": lambda target: streams(target, placement="trail", prune=5),
    "product": lambda target: streams(target, tree=StreamSettings(tree="product", k=2)),
    "chain": lambda target: streams(target, tree=StreamSettings(tree="chain")),
    "frequent": lambda target: StreamDrafter(target, small_adapter(target, RICH, FREQUENT), BEST),
    "combined": lambda target: CombinedDrafter([streams(target), PromptLookupDrafter()], nodes=10),
    "streams+suffix": lambda target: CombinedDrafter([streams(target), SuffixDrafter()], nodes=10),
    "streams+lookahead": lambda target: CombinedDrafter(
        [streams(target, placement="trail"), LookaheadDrafter(LookaheadSettings(window=3, ngram=3))], nodes=10
    ),
    "combined-pruned": lambda target: CombinedDrafter([streams(target, prune=5), PromptLookupDrafter()], nodes=10),
}
# ragged prompts, one of a single token; a short answer leaves in the middle of the others
RAGGED = [request(n, n, new) for n, new in ((9, 18), (1, 5), (14, 18), (4, 11), (7, 18), (2, 13))]


# every drafter on one family, and streams and two methods at once on the others
QUICK = [(case, name) for case in ("gemma2", "gpt2") for name in ("ride", "trail", "combined")]
DECODED = [
    pytest.param(case, name, marks=() if case == "llama" or (case, name) in QUICK else pytest.mark.thorough)
    for case in sorted(CASES)
    for name in DRAFTERS
]


@pytest.mark.parametrize(("case", "name"), DECODED)
def test_greedy_output_equals_plain_decoding(case: str, name: str) -> None:
    target = small(case)
    wanted = plain(target, RAGGED)
    alone, _ = decode(target, RAGGED[:2], DRAFTERS[name](target))
    assert alone == wanted[:2]
    together, steps = decode(target, RAGGED, DRAFTERS[name](target), rows=4)
    assert together == wanted
    assert [row[-1].finish for row in steps] == ["length"] * len(RAGGED)
    for row in steps:
        for step in row:
            assert len(step.tokens) == len(step.sources) <= len(step.verdict.path)
            assert step.tree.size - 1 <= step.drafted


@pytest.mark.parametrize("name", DRAFTERS)
def test_matching_with_a_seed_equals_plain_sampling(name: str) -> None:
    target = small()
    sampling = SamplingParams(temperature=0.8, top_k=9, top_p=0.95, min_p=0.01)
    requests = [replace(r, sampling=replace(sampling, seed=i)) for i, r in enumerate(RAGGED)]
    wanted = plain(target, requests)
    assert decode(target, requests, DRAFTERS[name](target), rows=3)[0] == wanted
    assert wanted != plain(target, RAGGED)
    # greedy and sampled rows share a batch
    mixed = [r if i % 2 else RAGGED[i] for i, r in enumerate(requests)]
    assert decode(target, mixed, DRAFTERS[name](target), rows=4)[0] == plain(target, mixed)


def forbid_evens(history: Sequence[int], logits_V: Tensor) -> Tensor:
    logits_V = logits_V.clone()
    logits_V[0 if history[-1] % 2 else 1 :: 2] -= 1.5
    return logits_V


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "lookahead", "ride", "pruned-trail", "combined"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_and_processors_look_at_each_nodes_own_history(name: str, temperature: float) -> None:
    target = small()
    for options in ({"repetition_penalty": 1.7}, {"processors": (forbid_evens,)}):
        sampling = SamplingParams(temperature=temperature, seed=5, **options)
        requests = [replace(r, sampling=sampling) for r in RAGGED[:3]]
        wanted = plain(target, requests)
        assert decode(target, requests, DRAFTERS[name](target), rows=2)[0] == wanted
        assert wanted != plain(target, [replace(r, sampling=replace(sampling, **NEUTRAL)) for r in requests])


NEUTRAL = {"repetition_penalty": 1.0, "processors": ()}


class Noise(Drafter):
    """Random trees of random sizes."""

    name, rules, max_nodes = "noise", ("match",), 9

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        found = []
        for row in rows:
            size = int(self.rng.integers(1, self.max_nodes + 1))
            parents = [-1, *(int(self.rng.integers(0, i)) for i in range(1, size))]
            tokens = [row.root, *self.rng.integers(0, VOCABULARY, size - 1)]
            tree = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
            found.append(tree.select((tree.depths <= row.max_depth).nonzero()[0]))
        return found


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_changes_nothing(case: str, temperature: float) -> None:
    target = small(case)
    requests = [replace(r, sampling=SamplingParams(temperature=temperature, seed=7)) for r in RAGGED]
    assert decode(target, requests, Noise(), rows=4)[0] == plain(target, requests)


def test_an_oracle_reaches_the_maximum() -> None:
    target, depth, new = small(), 4, 20
    requests = [request(n, n, new) for n in (9, 3, 6)]
    answers, alone = decode(target, requests)
    texts = [[*r.prompt_ids, *a] for r, a in zip(requests, answers, strict=True)]
    found, steps = decode(target, requests, Oracle(texts, depth), rows=3)
    assert found == answers
    assert [len(row) for row in alone] == [new] * 3
    assert [len(row) for row in steps] == [new // (depth + 1)] * 3
    for row in steps:
        assert all(step.sources == ("oracle",) * depth + ("target",) for step in row)


@pytest.mark.parametrize("cut", range(1, 12))
def test_the_length_limit_and_end_tokens_cut_inside_an_accepted_path(cut: int) -> None:
    target = small()
    asked = request(9, 9, 30)
    (answer,), _ = decode(target, [asked])
    texts = [[*asked.prompt_ids, *answer]]
    (short,), (steps,) = decode(target, [replace(asked, max_new_tokens=cut)], Oracle(texts, 4))
    assert short == answer[:cut]
    assert steps[-1].finish == "length"
    stop = answer[cut - 1]
    first = answer.index(stop) + 1
    (stopped,), (steps,) = decode(target, [replace(asked, stop_ids=frozenset({stop}))], Oracle(texts, 4))
    assert stopped == answer[:first]
    assert steps[-1].finish == "stop"
    assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)


def watched(drafter: Drafter, sizes: list[int]) -> Drafter:
    """A drafter that is checked for keeping to its depth and its budget."""

    def draft(rows: Sequence[Row], budget: int) -> list[DraftTree]:
        trees = type(drafter).draft(made, rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            assert tree.tokens[0] == row.root
            assert tree.max_depth <= row.max_depth
            assert tree.size <= min(budget, drafter.max_nodes)
            sizes.append(tree.size)
        return trees

    made = altered(drafter, draft=draft)
    return made


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_drafts_keep_to_their_room_up_to_the_models_last_position(name: str, case: str) -> None:
    target = small(case)
    asked = [request(80, 3, 100), request(85, 4, 3)]
    sizes: list[int] = []
    found, steps = decode(target, asked, watched(DRAFTERS[name](target), sizes), rows=2, capacity=500)
    assert found == plain(target, asked, capacity=500)
    assert len(found[0]) == 96 - 80
    assert steps[0][-1].finish == "length"
    assert max(sizes) > 1


@pytest.mark.parametrize("name", ["ride", "combined"])
def test_a_prompt_of_several_chunks_is_as_one_that_is_read_at_once(name: str) -> None:
    long = 3 * CHUNK
    target = build_decoder(
        replace(LLAMA, max_positions=long, rope=replace(LLAMA.rope, max_positions=long)), device="cpu"
    )
    randomise(target, seed=1)
    read: list[tuple[int, int]] = []
    asked = replace(request(2 * CHUNK + 102, 1, 24), on_prompt=lambda done, total: read.append((done, total)))
    engine, texts = Engine(target, DRAFTERS[name](target), capacity=long), []
    for chunk, drafter in ((CHUNK, None), (long, NoDrafter())):
        key = engine.join(asked, drafter)
        while engine.read(key, chunk):
            pass
        texts.append([token for step in engine.run() for token in step.tokens])
    total = 2 * CHUNK + 101  # the last token is the first root
    assert read == [(CHUNK, total), (2 * CHUNK, total), (total, total), (total, total)]
    assert len(texts[0]) == 24
    assert texts[0] == texts[1]


def test_a_cancelled_row_leaves_the_others_alone() -> None:
    target = small()
    wanted = plain(target, RAGGED[:4])
    for victim in range(4):
        engine = Engine(target, DRAFTERS["ride"](target), rows=4, capacity=96)
        keys = [engine.add(r) for r in RAGGED[:4]]
        found: dict[int, list[int]] = {key: [] for key in keys}
        for _ in range(2):
            for step in engine.step():
                found[step.row] += step.tokens
        engine.remove(keys[victim])
        engine.remove(keys[victim])  # a row that is gone is gone
        for step in engine.run():
            assert step.row != keys[victim]
            found[step.row] += step.tokens
        for number, key in enumerate(keys):
            assert found[key] == (wanted[number] if number != victim else wanted[number][: len(found[key])])
    engine.add(RAGGED[0])
    engine.clear()
    assert engine.active == 0
    assert engine.cache.count == 0


def forward(target: Decoder, text: Sequence[int]) -> tuple[Tensor, Cache]:
    """Logits [N, V] of a text in one pass, and its cache."""
    cache = new_cache(target, capacity=len(text))
    with torch.no_grad():
        output = target(Inputs.of_prompt(text), cache)
    cache.commit([range(len(text))])
    return target.logits(output.hidden_MD), cache


@pytest.mark.parametrize("case", SOME_CASES)
@pytest.mark.parametrize("name", ["ride", "pruned-trail", "combined-pruned", "lookahead", "streams+lookahead"])
def test_the_cache_is_a_fresh_prefill_after_every_step(case: str, name: str) -> None:
    target = small(case)
    engine = Engine(target, DRAFTERS[name](target), rows=3, capacity=96)
    texts = {engine.add(r): list(r.prompt_ids) for r in RAGGED[:3]}
    while engine.active:
        for step in engine.step():
            texts[step.row] += step.tokens
        for slot, member in enumerate(engine._members):
            text = texts[member.row.id]
            assert member.row.tokens == text
            assert engine.cache.lengths[slot] == len(text) - 1
            _, fresh = forward(target, text[:-1])
            n = len(text) - 1
            assert torch.allclose(engine.cache.keys[:, slot, :, :n], fresh.keys[:, 0], atol=2e-5)
            assert torch.allclose(engine.cache.values[:, slot, :, :n], fresh.values[:, 0], atol=2e-5)


@pytest.mark.parametrize("name", ["prompt_lookup", "ride", "pruned-trail"])
def test_log_probs_are_the_targets_own(name: str) -> None:
    target = small()
    requests = [replace(r, log_probs=True, sampling=SamplingParams(temperature=0.8, top_k=4)) for r in RAGGED[:3]]
    found, steps = decode(target, requests, DRAFTERS[name](target), rows=3)
    for asked, answer, row in zip(requests, found, steps, strict=True):
        told = [log for step in row for log in step.log_probs or ()]
        logits, _ = forward(target, [*asked.prompt_ids, *answer])
        start = len(asked.prompt_ids) - 1
        wanted = log_probs(logits[start:-1], torch.tensor(answer))
        assert told == pytest.approx(wanted.tolist(), abs=1e-4)


def test_rules_that_a_drafter_cannot_serve_are_refused() -> None:
    target = small()
    sampled = request(4, 1, 5, sampling=SamplingParams(temperature=1.0), rule="rejection")
    for name in ("prompt_lookup", "ride", "pruned-ride", "combined"):
        engine = Engine(target, DRAFTERS[name](target))
        with pytest.raises(CapabilityError, match="match"):
            engine.add(sampled)
        assert engine.active == 0
    product = Engine(target, DRAFTERS["product"](target))
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, repetition_penalty=1.2)):
        with pytest.raises(CapabilityError, match="match"):
            product.add(replace(sampled, sampling=sampling))
    product.add(sampled)
    assert sum(len(step.tokens) for step in product.run()) == 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request([], 5), "empty"),
        (Request([1, VOCABULARY], 5), "vocabulary ends at 18"),
        (Request([1, -1], 5), "token id -1"),
        (Request([1], 0), "max_new_tokens"),
        (Request(prompt(96), 5), "model's limit is 96"),
        (Request(prompt(40), 5), "cache holds 40"),
    ],
)
def test_errors_leave_the_engine_usable(bad: Request, message: str) -> None:
    target = small()
    engine = Engine(target, DRAFTERS["trail"](target), rows=2, capacity=40)
    key = engine.add(RAGGED[0])
    first = engine.step()
    with pytest.raises(InputError, match=message):
        engine.add(bad)
    rest = [token for step in (*first, *engine.run()) for token in step.tokens if step.row == key]
    assert rest == plain(target, RAGGED[:1])[0]


def test_a_full_engine_and_a_prefill_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small()
    engine = Engine(target, NoDrafter(), rows=1, capacity=40)
    engine.add(RAGGED[0])
    with pytest.raises(InputError, match="rows"):
        engine.add(RAGGED[1])
    assert engine.active == engine.cache.count == 1
    engine.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.add(RAGGED[0])
    assert engine.active == engine.cache.count == 0
    engine.add(RAGGED[0])
    assert [t for step in engine.run() for t in step.tokens] == plain(target, RAGGED[:1])[0]


@pytest.mark.parametrize(("rows", "capacity"), [(0, 40), (1, 1)])
def test_engines_of_no_size(rows: int, capacity: int) -> None:
    with pytest.raises(AnabranchError, match="at least 1 row"):
        Engine(small(), NoDrafter(), rows=rows, capacity=capacity)


def test_combining() -> None:
    target = small()
    with pytest.raises(CapabilityError, match="at most one"):
        CombinedDrafter([streams(target, placement="ride"), streams(target, placement="ride")])
    with pytest.raises(InputError, match="nodes"):
        CombinedDrafter([streams(target)], nodes=1)


class _Overflowing:
    """Lets a decoder's head give NaN or infinite scores after a few passes, as activations that overflow do."""

    def __init__(self, decoder: Decoder, value: float, after: int) -> None:
        self.left, self.value = after, value
        self.handle = decoder.head.register_forward_hook(self.spoil)

    def spoil(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left >= 0:
            return output
        return output.clone().index_fill_(-1, torch.tensor([3]), self.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": SamplingParams(temperature=1.0)},
        {"sampling": SamplingParams(temperature=1.0, top_p=0.9, top_k=5)},
        {"sampling": SamplingParams(temperature=0.7), "rule": "rejection"},
        {"sampling": SamplingParams(repetition_penalty=1.3)},
        {"log_probs": True},
    ],
)
def test_scores_that_are_not_numbers_emit_nothing_and_free_the_rows(value: float, options: dict[str, Any]) -> None:
    decoder = small()
    sampled = options.get("rule") == "rejection"
    drafter = streams(decoder, tree=StreamSettings(tree="chain")) if sampled else NoDrafter()
    engine = Engine(decoder, drafter, rows=2, capacity=64)
    spoiled = _Overflowing(decoder, value, after=2)
    try:
        engine.add(request(5, 1, **options))
        engine.add(request(7, 2, **options))
        assert len(engine.step()) == len(engine.step()) == 2
        with pytest.raises(NumericsError, match="not finite numbers in float32"):
            engine.step()
    finally:
        spoiled.handle.remove()
    assert engine.active == 0
    engine.add(request(5, 1))
    again = [token for step in engine.run() for token in step.tokens]
    assert again == decode(decoder, [request(5, 1)])[0][0]
