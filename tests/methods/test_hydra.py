"""Hydra's heads: conditioned on the path, with and without a prefix layer; trees, exactness and training."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_same_trees import WORDS as IDS
from test_same_trees import heads as random_heads
from torch import Tensor

import anabranch
from anabranch.analysis.cost import cost
from anabranch.analysis.cost import target as published_target
from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.methods import make_drafter
from anabranch.methods.heads.drafter import HeadDrafter, HeadSettings
from anabranch.methods.heads.objective import HeadObjective, LossOptions
from anabranch.methods.hydra.draft import HydraDraft, PrefixDrafter
from anabranch.methods.hydra.module import HydraConfig, HydraModule, Memory, PrefixLayer
from anabranch.model.decoder import Decoder
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from small import (
    SOME_CASES,
    WIDE,
    completions,
    decode,
    decoded_length,
    paths_of,
    prompt,
    randomise,
    request,
    small,
    train_on,
)
from toy_text import ToyFolders, train_toy

ROOT = 6
MORE = pytest.mark.thorough


def heads(target: Decoder, vocabulary: Tensor | None = IDS, **config: Any) -> HydraModule:
    return random_heads(HydraModule, HydraConfig(**{"num_heads": 3, **config}), target, vocabulary)  # type: ignore[no-any-return]


def drafter(target: Decoder, settings: HeadSettings | None = None, **config: Any) -> HeadDrafter:
    module = heads(target, **config)
    made = PrefixDrafter if module.config.prefix else HeadDrafter
    return made("hydra", HydraDraft(target, module, settings or HeadSettings(nodes=9, k=4)))


def log_probs(
    target: Decoder, module: HydraModule, read_D: Tensor, path: tuple[int, ...], ids: list[int]
) -> dict[int, float]:
    """The distribution of the token after ``ROOT, *path``, from the formulae of the paper."""
    k = len(path)
    embeddings = target.embedding.weight[[ROOT, *path]]
    if module.config.embeddings == "unit":
        embeddings = embeddings / embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    first, *later = module.chain(k)
    x = torch.cat((read_D, embeddings.flatten()))
    assert first.residual is not None
    x = first.residual @ x + first.residual_bias + F.silu(first.weight @ x + first.bias)
    for block in later:
        x = x + F.silu(block.weight @ x + block.bias)
    z = (target.head.weight[ids] if module.weights is None else module.weights[k]) @ x
    if target.head.bias is not None:
        z = z + target.head.bias[ids]
    if (cap := target.config.logit_softcap) is not None:
        z = torch.tanh(z / cap) * cap
    return dict(zip(ids, z.log_softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {}),
        ("gemma2", {"embeddings": "raw", "num_layers": 2}),
        ("phi", {"head": "own"}),
    ],
)
def test_a_best_first_tree_holds_the_most_probable_nodes(case: str, config: dict[str, Any]) -> None:
    target, ids = small(case), IDS.tolist()
    module = heads(target, **config)
    draft = HydraDraft(target, module, HeadSettings(nodes=8, k=9))
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    trees = draft.build(draft.states(hidden), [ROOT] * 2)
    for b, tree in enumerate(trees):
        joint = {(): 0.0}
        for depth in range(3):
            for path in itertools.product(ids, repeat=depth):
                for token, log_prob in log_probs(target, module, hidden[b], path, ids).items():
                    joint[(*path, token)] = joint[path] + log_prob
        assert paths_of(tree) == set(sorted(joint, key=joint.__getitem__, reverse=True)[:8])
        assert tree.log_probs is not None
        for node in range(tree.size):
            path = tuple(tree.tokens[list(tree.path_to(node))[1:]].tolist())
            assert tree.log_probs[node] == pytest.approx(joint[path], abs=1e-4)


@pytest.mark.parametrize("shape", [HeadSettings(nodes=9), HeadSettings("chain"), HeadSettings("product", k=2)])
def test_trees_keep_to_their_budget_and_depth(shape: HeadSettings) -> None:
    draft = HydraDraft(small(), heads(small()), shape)
    states = draft.states(torch.randn(3, 32, generator=torch.Generator().manual_seed(3)))
    assert all(tree.size == draft.max_nodes for tree in draft.build(states, [1, 2, 3]))
    for tree, limit in zip(draft.build(states, [1, 2, 3], budget=4, depths=[1, 2, 3]), (1, 2, 3), strict=True):
        assert 1 < tree.size <= 4
        assert tree.max_depth <= limit


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("tree", ["best", pytest.param("chain", marks=MORE), pytest.param("product", marks=MORE)])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9)], ids=["greedy", "sampled"])
def test_matching_emits_what_plain_decoding_emits(tree: Any, prefix: bool, sampling: SamplingParams) -> None:
    target = small()
    asked = [request(n, n, 6 + 3 * n, sampling=replace(sampling, seed=n)) for n in range(1, 7)]
    asked[1] = replace(asked[1], sampling=SamplingParams())  # a greedy neighbour
    plain, _ = decode(target, asked)
    shape = HeadSettings(tree, nodes=9 if tree == "best" else 0, k=2)
    found, steps = decode(target, asked, drafter(target, shape, prefix=prefix), rows=3)
    assert found == plain
    assert sum(map(len, steps)) < sum(map(len, plain))


@pytest.mark.parametrize("case", SOME_CASES)
def test_every_wiring_is_decoded_exactly_with_a_prefix_layer(case: str) -> None:
    target = small(case)
    asked = [request(n, n, 14) for n in range(3, 6)]
    assert decode(target, asked, drafter(target, prefix=True), rows=2)[0] == decode(target, asked)[0]


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi"])
def test_a_prefix_layer_reads_in_parts_what_training_reads_at_once(case: str) -> None:
    target = small(case)
    module = heads(target, prefix=True)
    hidden = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(3))
    wanted = module.prefix(target, hidden)
    layer, memories = PrefixLayer(target, module), [Memory(), Memory()]
    for ends in ((4, 1), (5, 6), (11, 9)):
        for b, end in enumerate(ends):
            read = memories[b].length + sum(map(len, memories[b].waiting))
            memories[b].add(hidden[b, read : end - 1])
            memories[b].add(hidden[b, end - 1 : end])
        found = layer.read(memories)
        for b, end in enumerate(ends):
            assert torch.allclose(found[b], wanted[b, end - 1], atol=1e-5)


def test_drafts_under_a_prefix_layer_are_those_of_the_whole_text() -> None:
    """Rows that join, leave and wait: every draft is the one that one pass over the text gives."""
    target = small()
    module = heads(target, prefix=True)
    draft = HydraDraft(target, module, HeadSettings(nodes=6, k=4))
    made = PrefixDrafter("hydra", draft)
    asked = [request(n, n, 20 + n) for n in range(2, 7)]
    texts, steps = decode(target, asked, made, rows=2)
    compared = 0
    for each, text, row in zip(asked, texts, steps, strict=True):
        whole = [*each.prompt_ids, *text]
        batch = Batch.of([Example(tuple(whole[:1]), tuple(whole[1:]))])
        frozen = HeadObjective(target, module, LossOptions(), draft=HydraDraft).freeze(batch)
        read, at = module.prefix(target, frozen)[0], len(each.prompt_ids)
        for step in row:
            if step.tree.size > 1 and at + 4 <= len(whole):
                # as at decoding, the root is the last token, and the heads read the state of the one before it
                own = draft.row()
                assert own is not None
                states = draft.states(read[None, at - 2])
                (again,) = draft.build(states, [whole[at - 1]], [own.extend(whole[:at])])
                assert paths_of(step.tree) == paths_of(again)
                compared += 1
            at += len(step.tokens)
    assert compared > 10


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_heads_draft_as_the_unpacked_ones_do(dtype: torch.dtype) -> None:
    config = replace(WIDE, intermediate_size=64)
    plain, packed = (build_decoder(config, device="cpu", dtype=dtype) for _ in range(2))
    for decoder in (plain, packed):
        randomise(decoder, seed=1)
    module, copied = (heads(plain, num_layers=2, prefix=True).to(dtype) for _ in range(2))
    assert pack_decoder(packed)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = []
    for target, weights in ((plain, module), (packed, copied)):
        layer, memory = PrefixLayer(target, weights), Memory()
        memory.add(hidden)
        draft = HydraDraft(target, weights, HeadSettings(nodes=9))
        with torch.inference_mode():
            read = layer.read([memory])
        found.append((read.float(), draft.build(draft.states(read), [ROOT])[0]))
    (wanted, tree), (read, again) = found
    assert torch.allclose(read, wanted, atol=1e-4 if dtype == torch.float32 else 0.3)  # int4 products
    if dtype == torch.float32:
        assert paths_of(tree) == paths_of(again)
    asked = [request(n, n, 20) for n in range(3, 6)]
    made = PrefixDrafter("hydra", HydraDraft(packed, copied))
    assert decode(packed, asked, made, rows=2)[0] == decode(packed, asked)[0]


@pytest.mark.parametrize("prefix", [pytest.param(False, marks=MORE), True])
def test_training_reaches_what_replay_predicts(prefix: bool) -> None:
    target, texts = small(), completions(small())
    torch.manual_seed(0)
    module = HydraModule(target.config, HydraConfig(3, prefix=prefix), None)
    objective = HeadObjective(target, module, LossOptions(soft=0.0), draft=HydraDraft, segment=6)
    assert len(list(objective.segments(Batch.of(texts)))) == (1 if prefix else 3)
    before = objective.evaluate(texts)
    train_on(texts, objective, module, steps=40, lr=1e-2)
    assert all(parameter.grad is not None for parameter in module.parameters())
    after = objective.evaluate(texts, nodes=(4,))
    assert set(after) == {"tree", "chain", "4 nodes", "top 1", "top 8", "at least", "by source"}
    assert after["tree"] > before["tree"] + 0.5
    made = (PrefixDrafter if prefix else HeadDrafter)("hydra", HydraDraft(target, module.requires_grad_(False)))
    assert decoded_length(target, texts, made) == pytest.approx(after["tree"], abs=0.05)


def test_fresh_heads_score_as_the_target_does() -> None:
    target = small()
    hidden = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(3))
    module = HydraModule(target.config, HydraConfig(2, prefix=True), None).requires_grad_(False)
    assert torch.allclose(module.prefix(target, hidden), hidden)
    states = module.predicted(target, hidden[0], torch.tensor([prompt(2)] * 4))
    assert torch.allclose(states[:, 0], hidden[0])
    assert torch.allclose(states[:, 1], hidden[0])


def test_the_papers_parameter_counts() -> None:
    config = published_target("Llama-2-7B").config
    h, v = config.hidden_size, config.vocab_size
    with torch.device("meta"):
        found = HydraModule(config, HydraConfig(head="own")).num_parameters()
        deeper = HydraModule(config, HydraConfig(head="own", num_layers=4, prefix=True)).num_parameters()
    each = [2 * ((k + 1) * h * h + h) + h * v for k in range(1, 5)]
    assert found == sum(each) == cost("hydra", "Llama-2-7B").parameters
    layer = 4 * h * h + 3 * h * config.intermediate_size + 2 * h
    assert deeper == found + 4 * 3 * (h * h + h) + layer


def test_a_drafter_needs_its_adapter_and_follows_its_shape() -> None:
    with pytest.raises(CapabilityError, match="'hydra' needs an adapter that was trained for this target"):
        make_drafter("hydra", small())
    assert isinstance(make_drafter("hydra:tree=auto", small(), heads(small(), prefix=True)), PrefixDrafter)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
@pytest.mark.parametrize("recipe", ["small", "plus-plus", "paper"])
def test_from_completions_to_heads_that_draft(recipe: str, toys: ToyFolders, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    options = ("--num-heads", 3, "--epochs", 8, "--batch-tokens", 200, "--warmup", 4, "--lr", 0.01, "--no-timing")
    more = ("--prefix",) if recipe == "small" else ()
    record = json.loads(train_toy(toys, folder, "hydra", "--recipe", recipe, *options, *more).stdout)
    assert record["method"] == "hydra"
    assert record["config"]["prefix"] == (recipe != "paper")
    assert record["measured"]["predicted mean acceptance length"]["tree"] > 1.0
    text: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with anabranch.load(toys.model, adapter=folder, drafter="hydra:tree=8", dtype="float32") as model:
        for asked in (text, {"temperature": 0.8, "seed": 3, **text}):
            wanted = model.generate("the other", drafter="none", **asked)
            for spec in ("hydra:tree=8", "hydra:tree=auto", "hydra+suffix"):
                assert model.generate("the other", drafter=spec, **asked).token_ids == wanted.token_ids
