"""Small targets, adapters and drafters for tests above the decoder: random weights, a vocabulary of a few words.

The wiring varies where streams and engine could go wrong (grouped heads, sliding windows, soft caps, learned
positions, parallel blocks); that each family's wiring is right is ``tests/model/test_parity.py``'s business.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from anabranch.control.controller import Controller
from anabranch.control.costs import Costs, PassCosts, StepCosts
from anabranch.decoding.engine import Engine, Request, Step
from anabranch.drafting.drafter import Drafter, Row
from anabranch.learning.examples import Batch, Example
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.terms import lora_of
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target
from anabranch.model.lora import Lora, Term, decoder_rows, places
from anabranch.model.passes import PassResult
from anabranch.model.weights import build_decoder, fingerprint
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree

VOCABULARY = 19
LLAMA = ModelConfig(
    family="llama",
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=96,
    rope=RopeConfig(dim=8, max_positions=96),
)
# of sizes that the native kernels take
WIDE = replace(
    LLAMA,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=96,
    rope=RopeConfig(dim=32, max_positions=96),
)
CASES: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, family="qwen3", qk_norm="head", qkv_bias=True, tied_head=True),
    "mistral": replace(LLAMA, family="mistral", sliding_window=6),
    "gemma2": replace(
        LLAMA,
        family="gemma2",
        num_layers=4,
        norm_plus_one=True,
        post_norms=True,
        activation="gelu_tanh",
        attention_scale=0.3,
        attention_softcap=4.0,
        logit_softcap=3.0,
        sliding_window=5,
        sliding_layers=(True, False, True, False),
        embedding_scale=32**0.5,
    ),
    "gpt2": replace(
        LLAMA,
        family="gpt2",
        num_kv_heads=4,
        position="learned",
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation="gelu_tanh",
    ),
    "phi": replace(
        LLAMA,
        family="phi",
        norm="layer",
        wiring="parallel",
        head_bias=True,
        gated_mlp=False,
        activation="gelu_tanh",
        rope=RopeConfig(dim=4, max_positions=96),
    ),
}
# families for every run; the others take long and add little above the decoder
SOME_CASES = [
    case if case in ("gemma2", "gpt2", "llama") else pytest.param(case, marks=pytest.mark.thorough)
    for case in sorted(CASES)
]
RICH = StreamConfig(
    num_streams=3,
    num_stream_layers=2,
    stream_mlp="mlp+adapter",
    adapter_rank=3,
    attention_rank=2,
    mlp_rank=2,
    pruning_rank=2,
    conditioning="path",
    conditioning_rank=5,
    root_width=7,
)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=1),
    "cut": SamplingParams(temperature=1.2, top_k=5, top_p=0.9, min_p=0.01, seed=2),
    "penalty": SamplingParams(repetition_penalty=1.3),
    "processors": SamplingParams(temperature=1.0, processors=(lambda tokens, logits: logits - 50 * (logits > 2),)),
}


def with_terms(target: Decoder, layers: nn.ModuleList) -> Decoder:
    """A copy of a target with the terms of its layers added to the weights."""
    made = copy.deepcopy(target)
    for name, term in lora_of(target.config, layers).terms.items():
        place = places(target.config)[name]
        weight = made.blocks[place.layer].get_submodule(place.part).weight
        assert isinstance(weight, Tensor)
        up_OR = decoder_rows(target.config, place, term.up_OR)
        weight.data[place.rows] += term.scale * up_OR @ term.down_RI
    return made


def randomise(module: nn.Module, seed: int, scale: float = 0.3) -> None:
    """Weights large enough that a wrong wire shows, in a fixed order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))


@cache
def small(case: str = "llama") -> Decoder:
    """A target of a case of ``CASES`` in float32."""
    decoder = build_decoder(CASES[case], device="cpu")
    randomise(decoder, seed=1)
    return decoder


def small_adapter(target: Decoder, config: StreamConfig = RICH, vocabulary: Tensor | None = None) -> StreamAdapter:
    """An adapter with random weights, so that every term of it counts."""
    adapter = StreamAdapter(target.config, config, vocabulary)
    randomise(adapter, seed=2)
    return adapter.to(target.device).eval().requires_grad_(False)


def rows_of(values_M: Tensor, result: PassResult) -> Tensor:
    """Values of a pass for each node [M, ...] by rows [B, N, ...], padded with zeros."""
    return pad_sequence([values_M[result.nodes(b)] for b in range(len(result.counts_B))], batch_first=True)


def logits_of(result: PassResult) -> Tensor:
    """The logits of a pass by rows [B, N, V]."""
    return rows_of(result.logits_MV, result)


def new_cache(target: Decoder, rows: int = 1, *, capacity: int = 96, prompt: int = 0) -> Cache:
    """An empty cache of a target, with ``rows`` rows for prompts of ``prompt`` tokens."""
    cache = Cache(target.config, rows=rows, capacity=capacity, dtype=target.dtype, device=target.device)
    for _ in range(rows):
        cache.add_row(prompt)
    return cache


def logits_after(target: Decoder, ids: Sequence[int]) -> Tensor:
    """The logits [N, V] of a text, read in one pass."""
    return logits_of(target(Inputs.of_prompt(list(ids)), new_cache(target, prompt=len(ids))))[0]


class Words:
    """A tokenizer of the words w0, w1, ...; its chat template puts w3 before and w4 behind each message."""

    chat_template = "w3 ... w4"
    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) % VOCABULARY for word in text.split()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(f"w{i}" for i in ids)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        return f"w{ids}" if isinstance(ids, int) else [f"w{i}" for i in ids]

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return " ".join(f"w3 {message['content']} w4" for message in messages)


def as_target(decoder: Decoder, *, eos: tuple[int, ...] = (2,), name: str = "toy") -> Target:
    """A ``Target`` as ``load_target`` returns it."""
    return Target(decoder, Words(), replace(decoder.config, eos_token_ids=eos), name, None, fingerprint(decoder))


def drawn_lora(config: ModelConfig, chosen: str = "", *, rank: int = 3, seed: int = 5) -> Lora:
    """Random terms for the modules whose names contain ``chosen``."""
    noise = torch.Generator().manual_seed(seed)
    terms = {}
    for name, place in places(config).items():
        if chosen in name:
            shapes = (rank, place.width), (place.outputs, rank)
            down, up = (0.1 * torch.randn(shape, generator=noise) for shape in shapes)
            terms[name] = Term(down, up, 1.5)
    return Lora(terms)


def merged_copy(target: Decoder, lora: Lora) -> Decoder:
    """A copy with the terms added to its weights."""
    tuned = copy.deepcopy(target)
    for name, place in places(target.config).items():
        if name in lora.terms:
            weight: Any = tuned.blocks[place.layer].get_submodule(place.part).weight
            weight[place.rows] = lora.terms[name].merged(weight[place.rows])
    return tuned


class Oracle(Drafter):
    """Proposes the continuations of known texts, ``depth`` tokens at a time; nothing for other texts."""

    name, rules = "oracle", ("match",)

    def __init__(self, texts: Sequence[Sequence[int]], depth: int = 8) -> None:
        self.texts, self.depth, self.max_nodes = texts, depth, depth + 1

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        chains = []
        for row in rows:
            known = next((text for text in self.texts if list(text[: len(row.tokens)]) == row.tokens), row.tokens)
            ahead = known[len(row.tokens) :][: min(self.depth, row.max_depth)]
            chains.append(DraftTree.chain(row.root, ahead, source=self.name))
        return chains


class Timeless(Controller):
    """A controller that takes costs of passes from a table and drafts as free, however long they take here."""

    def __init__(self, table: str, target: Decoder) -> None:
        super().__init__(Costs(PassCosts(StepCosts.parse(table))), ragged=target.ragged)
        self.costs.timed = 1

    def saw_step(self, *_: Any, **__: Any) -> None:
        pass


def train_on(texts: Sequence[Example], objective: Any, module: nn.Module, *, steps: int, lr: float) -> list[float]:
    """The losses of ``steps`` steps of AdamW on one batch of texts."""
    batch = Batch.of(texts)
    frozen, optimizer = objective.freeze(batch), torch.optim.AdamW(module.parameters(), lr=lr)
    losses = [0.0] * steps
    for step in range(steps):
        optimizer.zero_grad()
        for segment in objective.segments(batch):
            loss = objective.loss(batch, frozen, segment).loss
            loss.backward()
            losses[step] += loss.item()
        optimizer.step()
    return losses


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def decode(
    target: Decoder, requests: Sequence[Request], drafter: Drafter | None = None, *, rows: int = 1, capacity: int = 96
) -> tuple[list[list[int]], list[list[Step]]]:
    """Tokens and steps of each request, in order; a row enters as another leaves."""
    engine = Engine(target, drafter or NoDrafter(), rows=rows, capacity=capacity)
    steps: list[list[Step]] = [[] for _ in requests]
    place: dict[int, int] = {}
    waiting = list(range(len(requests)))
    while waiting or engine.active:
        while waiting and engine.active < rows:
            number = waiting.pop(0)
            place[engine.add(requests[number])] = number
        for step in engine.step():
            steps[place[step.row]].append(step)
    return [[token for step in row for token in step.tokens] for row in steps], steps


_PLAIN: dict[tuple[Any, ...], list[list[int]]] = {}


def plain(target: Decoder, requests: Sequence[Request], *, capacity: int = 96) -> list[list[int]]:
    """The tokens of plain decoding, a row at a time; decoded once for equal requests to a target that never changes."""
    key = (target, capacity, repr(requests))
    if key not in _PLAIN:
        _PLAIN[key], _ = decode(target, requests, capacity=capacity)
    return _PLAIN[key]


def request(length: int, seed: int, new: int = 20, **options: Any) -> Request:
    """A request with a random prompt, plain greedy if nothing else is said."""
    sampling = options.pop("sampling", SamplingParams())
    return Request(prompt(length, seed), new, sampling, **options)


def completions(target: Decoder, count: int = 6, *, first: int = 4, new: int = 14) -> list[Example]:
    """The target's own completions of ``new`` tokens, of prompts of ``first``, ``first + 1``, ... tokens."""
    asked = [request(first + n, n, new) for n in range(count)]
    said = plain(target, asked)
    return [Example(tuple(each.prompt_ids), tuple(answer), "toy") for each, answer in zip(asked, said, strict=True)]


def write_answers(path: Path, count: int = 24) -> Path:
    """Write random prompts of 4 tokens with answers of 9 as a file that training reads."""
    rows = ({"id": n, "prompt_ids": prompt(4, n), "answer_ids": prompt(9, 50 + n)} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def decoded_length(target: Decoder, texts: Sequence[Example], drafter: Drafter) -> float:
    """The mean acceptance length of a drafter that decodes completions again, which come out the same."""
    asked = [Request(text.prompt_ids, len(text.answer_ids)) for text in texts]
    found, steps = decode(target, asked, drafter, rows=3)
    assert found == [list(text.answer_ids) for text in texts]
    return sum(map(len, found)) / sum(map(len, steps))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    return {tuple(tree.tokens[list(tree.path_to(node)[1:])].tolist()) for node in range(tree.size)}


def same_tree(tree: DraftTree, wanted: DraftTree) -> None:
    """The same nodes in the same order, from the same sources, with nearly the same probabilities."""
    assert tree.tokens.tolist() == wanted.tokens.tolist()
    assert tree.parents.tolist() == wanted.parents.tolist()
    assert tree.sources == wanted.sources
    assert (tree.log_probs is None) == (wanted.log_probs is None)
    if tree.log_probs is not None and wanted.log_probs is not None:
        np.testing.assert_allclose(tree.log_probs, wanted.log_probs, atol=1e-3)
