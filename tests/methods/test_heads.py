"""Draft heads: their trees follow from their scores, the output is exact, and training reaches what replay predicts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anabranch
from anabranch.analysis.cost import target as published_target
from anabranch.drafting.drafter import Row
from anabranch.drafting.head import DrawNoise
from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.learning.examples import Batch
from anabranch.methods import make_drafter
from anabranch.methods.heads.drafter import HeadDrafter, HeadSettings
from anabranch.methods.heads.module import begin_with, start_from_target
from anabranch.methods.heads.objective import HeadObjective, LossOptions
from anabranch.methods.medusa.draft import MedusaDraft
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule
from anabranch.model.decoder import Decoder
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams, position_keys, target_tokens
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

IDS = torch.tensor([0, 3, 4, 5, 8, 11, 12, 13, 17])
SHAPES = {
    "best": HeadSettings(nodes=9, k=4),
    "auto": HeadSettings("auto", nodes=9, k=4),
    "chain": HeadSettings("chain"),
    "sparse": HeadSettings("sparse", nodes=11),
    "product": HeadSettings("product", k=2, depth=2),
}
MORE = pytest.mark.thorough
SAMPLED = SamplingParams(temperature=0.9, seed=5)


def heads(target: Decoder, seed: int = 2, vocabulary: Tensor | None = IDS, **config: Any) -> MedusaModule:
    """Heads with random weights, near enough to the target's own scores to be right now and then."""
    module = MedusaModule(target.config, MedusaConfig(**{"num_heads": 3, **config}), vocabulary)
    randomise(module, seed, scale=0.05)
    generator = torch.Generator().manual_seed(seed)
    for weight in module.weights or ():
        with torch.no_grad():
            weight.copy_(target.head_rows(module.vocabulary))
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return module.eval().requires_grad_(False)


def drafter(target: Decoder, shape: str = "best", **config: Any) -> HeadDrafter:
    return HeadDrafter("medusa", MedusaDraft(target, heads(target, **config), SHAPES[shape]))


def log_probs(target: Decoder, module: MedusaModule, hidden_D: Tensor, k: int, ids: list[int]) -> dict[int, float]:
    """The distribution of head ``k`` (from 0), from the formulae of the paper."""
    x = hidden_D
    for block in module.chain(k):
        x = x + F.silu(block.weight @ x + block.bias)
    rows = target.head.weight[ids] if module.weights is None else module.weights[k]
    z = rows @ x
    if target.head.bias is not None:
        z = z + target.head.bias[ids]
    if (cap := target.config.logit_softcap) is not None:
        z = torch.tanh(z / cap) * cap
    return dict(zip(ids, z.log_softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("head", ["shared", "own"])
@pytest.mark.parametrize("case", ["llama", "gemma2", "phi"])
@pytest.mark.parametrize("layers", [pytest.param(1, marks=MORE), 2])
def test_a_best_first_tree_holds_the_most_probable_nodes(case: str, head: str, layers: int) -> None:
    target = small(case)
    module = heads(target, head=head, num_layers=layers)
    draft = MedusaDraft(target, module, HeadSettings(nodes=8, k=9))
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    own = [row for _ in range(2) if (row := draft.row()) is not None]
    assert bool(own) == (head == "shared")
    if own:
        own[0].extend([3, 7, 9])
    trees = draft.build(draft.states(hidden), [6, 7], own or None)
    for b, tree in enumerate(trees):
        ids = IDS.tolist() + ([7, 9] if own and b == 0 else [])
        levels = [log_probs(target, module, hidden[b], k, ids) for k in range(3)]
        joint = {(): 0.0}
        for depth in range(1, 4):
            for path in itertools.product(ids, repeat=depth):
                joint[path] = sum(level[token] for level, token in zip(levels, path, strict=False))
        assert paths_of(tree) == set(sorted(joint, key=joint.__getitem__, reverse=True)[:8])
        assert tree.log_probs is not None
        for node in range(tree.size):
            path = tuple(tree.tokens[list(tree.path_to(node))[1:]].tolist())
            assert tree.log_probs[node] == pytest.approx(joint[path], abs=1e-4)
            assert tree.sources[node] == ("target" if node == 0 else f"head {len(path)}")


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_keep_to_their_budget_and_depth(shape: str) -> None:
    target = small()
    draft = MedusaDraft(target, heads(target), SHAPES[shape])
    states = draft.states(torch.randn(3, 32, generator=torch.Generator().manual_seed(3)))
    whole = draft.build(states, [1, 2, 3])
    assert all(tree.size == draft.max_nodes for tree in whole)
    for tree, limit in zip(draft.build(states, [1, 2, 3], budget=4, depths=[1, 2, 3]), (1, 2, 3), strict=True):
        assert 1 < tree.size <= 4
        assert tree.max_depth <= limit
        assert tree.log_probs is not None
        above = tree.log_probs[tree.parents[1:]]
        assert (tree.log_probs[1:] <= above).all()


def test_a_sparse_tree_has_fixed_places_and_the_heads_own_probabilities() -> None:
    target = small()
    module = heads(target)
    draft = MedusaDraft(target, module, HeadSettings("sparse", nodes=12))
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    trees = draft.build(draft.states(hidden), [1] * 6)
    ranks: list[dict[int, tuple[int, ...]]] = []
    for tree in trees:  # nodes stand by probability, so siblings by rank
        ranks.append({0: ()})
        for node in range(1, tree.size):
            parent = int(tree.parents[node])
            ranks[-1][node] = (*ranks[-1][parent], tree.children(parent).index(node))
    assert len({frozenset(each.values()) for each in ranks}) == 1
    for b, tree in enumerate(trees):
        best = [
            sorted(level.items(), key=lambda x: -x[1])
            for level in (log_probs(target, module, hidden[b], k, IDS.tolist()) for k in range(3))
        ]
        first = [int(tree.tokens[child]) for child in tree.children(0)]
        assert first == [token for token, _ in best[0][: len(first)]]
        assert tree.log_probs is not None
        assert tree.log_probs[1] == pytest.approx(best[0][0][1], abs=1e-4)


@pytest.mark.parametrize("shape", [s if s in ("best", "sparse") else pytest.param(s, marks=MORE) for s in SHAPES])
@pytest.mark.parametrize("head", ["shared", pytest.param("own", marks=MORE)])
@pytest.mark.parametrize("sampling", [SamplingParams(), replace(SAMPLED, top_k=9)], ids=["greedy", "sampled"])
def test_matching_emits_what_plain_decoding_emits(shape: str, head: str, sampling: SamplingParams) -> None:
    target = small()
    asked = [request(n, n, 6 + 3 * n, sampling=replace(sampling, seed=n)) for n in range(2, 8)]
    asked[1] = replace(asked[1], sampling=SamplingParams())  # a greedy neighbour
    plain, _ = decode(target, asked)
    found, steps = decode(target, asked, drafter(target, shape, head=head), rows=3)
    assert found == plain
    assert sum(map(len, steps)) < sum(map(len, plain))


@pytest.mark.parametrize("case", SOME_CASES)
def test_every_wiring_is_decoded_exactly(case: str) -> None:
    target = small(case)
    asked = [request(n, n, 18) for n in range(3, 7)]
    assert decode(target, asked, drafter(target), rows=2)[0] == decode(target, asked)[0]


def test_heads_that_are_right_draft_what_the_target_will_draw() -> None:
    """With the target's states as heads' states the best sampled token of each place is the target's own."""
    target = small()
    draft = MedusaDraft(target, heads(target, vocabulary=None), HeadSettings("chain"))
    row = Row(prompt(6), 6, SamplingParams(temperature=0.7, seed=3))
    states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))
    (tree,) = draft.build(states, [row.root], [draft.row().extend(row.tokens)], [DrawNoise.of(row, 3)])  # type: ignore[union-attr]
    wanted = target_tokens(target.logits(states[0]), row.sampling, position_keys(3, [6, 7, 8]))
    assert tree.tokens[1:].tolist() == wanted.tolist()


@pytest.mark.skipif(native.library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["shared", "own"])
def test_packed_heads_draft_as_the_unpacked_ones_do(dtype: torch.dtype, head: str) -> None:
    plain, packed = (build_decoder(WIDE, device="cpu", dtype=dtype) for _ in range(2))
    for decoder in (plain, packed):
        randomise(decoder, seed=1)
    module, copied = (heads(plain, head=head, num_layers=2).to(dtype) for _ in range(2))
    assert pack_decoder(packed)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    loose, tight = MedusaDraft(plain, module), MedusaDraft(packed, copied)
    wanted, found = loose.states(hidden).float(), tight.states(hidden).float()
    assert torch.allclose(found, wanted, atol=1e-4 if dtype == torch.float32 else 0.3)  # int4 blocks
    if dtype == torch.float32:
        trees = zip(loose.build(wanted, [1] * 4), tight.build(found, [1] * 4), strict=True)
        assert all(paths_of(a) == paths_of(b) for a, b in trees)
    asked = [request(n, n, 20) for n in range(3, 7)]
    made = HeadDrafter("medusa", tight)
    assert decode(packed, asked, made, rows=2)[0] == decode(packed, asked)[0]


# -- training --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", ["shared", "own"])
@pytest.mark.parametrize("case", ["llama", "gemma2", "phi"])
def test_the_loss_is_the_sum_over_heads(case: str, head: str) -> None:
    target, options = small(case), LossOptions(decay=0.7, soft=0.4)
    module = heads(target, head=head).requires_grad_(True)
    texts = completions(target, 3)
    objective = HeadObjective(target, module, options, draft=MedusaDraft, segment=5)
    batch = Batch.of(texts)
    frozen = objective.freeze(batch)
    parts = [objective.loss(batch, frozen, segment) for segment in objective.segments(batch)]
    total, wanted = sum(part.loss.item() for part in parts), 0.0
    (sum(part.loss for part in parts)).backward()  # type: ignore[union-attr]
    assert all(parameter.grad is not None for parameter in module.parameters())
    own = sorted({*IDS.tolist(), *batch.tokens_BT.flatten().tolist()}) if head == "shared" else IDS.tolist()
    right = [0.0] * 3
    for b, text in enumerate((*e.prompt_ids, *e.answer_ids) for e in texts):
        for t in range(len(texts[b].prompt_ids) - 1, len(text) - 2):
            for k in range(3):
                if t + 2 + k < len(text) and text[t + 2 + k] in own:
                    found = log_probs(target, module, frozen[b, t], k, own)
                    z = target.logits(frozen[b, t + 1 + k])[own].softmax(-1).tolist()
                    soft = -sum(p * found[token] for p, token in zip(z, own, strict=True))
                    hard = -found[text[t + 2 + k]]
                    wanted += 0.7**k * (0.6 * hard + 0.4 * soft)
                    right[k] += max(found, key=found.__getitem__) == text[t + 2 + k]
    assert total == pytest.approx(wanted, rel=1e-4)
    assert sum(part.right_S for part in parts).tolist() == right  # type: ignore[union-attr]


@pytest.mark.parametrize("head", ["shared", "own"])
def test_training_reaches_what_replay_predicts(head: str) -> None:
    target, texts = small(), completions(small())
    module = MedusaModule(target.config, MedusaConfig(3, head=head), None)  # type: ignore[arg-type]
    start_from_target(target, module)
    objective = HeadObjective(target, module, LossOptions(soft=0.0), draft=MedusaDraft)
    before = objective.evaluate(texts, nodes=(4,))
    train_on(texts, objective, module, steps=60, lr=1e-2)
    after = objective.evaluate(texts, nodes=(4,))
    assert set(after) == {"tree", "chain", "sparse tree", "4 nodes", "top 1", "top 8", "at least", "by source"}
    assert after["tree"] > before["tree"] + 0.5
    assert after["tree"] >= after["4 nodes"] >= 1
    made = HeadDrafter("medusa", MedusaDraft(target, module.requires_grad_(False)))
    assert decoded_length(target, texts, made) == pytest.approx(after["tree"], abs=0.01)


def test_fresh_heads_score_as_the_target_does() -> None:
    target = small("phi")
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    wanted = target.logits(hidden)[:, IDS].log_softmax(-1).topk(4, dim=-1)
    for head in ("shared", "own"):
        module = MedusaModule(target.config, MedusaConfig(3, head=head), IDS)  # type: ignore[arg-type]
        start_from_target(target, module)
        draft = MedusaDraft(target, module.requires_grad_(False))
        states = draft.states(hidden)
        for k in range(3):
            tokens, _ = draft.heads[k].best_tokens(states[:, k : k + 1], 4)
            assert tokens[:, 0].tolist() == IDS[wanted.indices].tolist()


def test_weights_to_begin_with() -> None:
    target = small()
    trained = heads(target, head="own")
    fresh = MedusaModule(target.config, MedusaConfig(3, head="own"), torch.tensor([1, 3, 17]))
    start_from_target(target, fresh)
    begin_with(fresh, trained)
    assert fresh.weights is not None
    assert trained.weights is not None
    assert torch.equal(fresh.weights[1][1:], trained.weights[1][[1, 8]])
    assert torch.equal(fresh.weights[1][0], target.head.weight[1])
    assert torch.equal(fresh.chain(2)[0].weight, trained.chain(2)[0].weight)
    with pytest.raises(InputError, match="it has head 'own', but this training uses 'shared'"):
        begin_with(heads(target), trained)


# -- shapes, settings and refusals -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "printed", "digits"),
    [
        ("OPT-1.3b", 4.28e8, 3),  # v1 table 1
        ("Phi-1.3b", 4.36e8, 3),
        ("Llama-2-7B", 5.91e8, 3),  # OpenLlama-7b there: the same shape
        ("Mistral-7B", 5.9e8, 2),  # ACL table 3
        ("Phi-3", 4.3e8, 2),
        ("Llama-2-7B", 5.9e8, 2),
    ],
)
def test_the_papers_parameter_counts(name: str, printed: float, digits: int) -> None:
    config = published_target(name).config
    with torch.device("meta"):
        found = MedusaModule(config, MedusaConfig(head="own")).num_parameters()
        shared = MedusaModule(config, MedusaConfig()).num_parameters()
    h, v = config.hidden_size, config.vocab_size
    assert found == 4 * (h * h + h * v + h)  # with the block's bias
    assert shared == 4 * (h * h + h)
    # the papers cut digits off rather than round: 4.286e8 is printed as 4.28E8
    unit = 10 ** (9 - digits)
    assert found // unit * unit == pytest.approx(printed)


def test_heads_that_cannot_be_had() -> None:
    target = small()
    with pytest.raises(CapabilityError, match="'medusa' needs an adapter that was trained for this target"):
        make_drafter("medusa", target)
    with pytest.raises(InputError, match="depth is 4, but the adapter has only 3 heads"):
        make_drafter("medusa:depth=4", target, heads(target))
    with pytest.raises(InputError, match="more than 1,024 nodes"):
        make_drafter("medusa:tree=product,k=12", target, heads(target))
    with pytest.raises(CapabilityError, match="use rule='match'"):
        make_drafter("medusa", target, heads(target)).check(SAMPLED, "rejection")
    for options in ({"decay": 0.0}, {"soft": 1.5}):
        with pytest.raises(InputError, match="must be"):
            LossOptions(**options)


@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
@pytest.mark.parametrize("head", ["shared", pytest.param("own", marks=pytest.mark.thorough)])
def test_from_completions_to_heads_that_draft(head: str, toys: ToyFolders, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    options = ("--head", head, "--num-heads", 3, "--epochs", 12, "--batch-tokens", 200, "--warmup", 4, "--lr", 0.02)
    rest = ("--recipe", "small", "--draft-vocabulary", 128, "--no-timing")
    record = json.loads(train_toy(toys, folder, "medusa", *options, *rest).stdout)
    assert record["method"] == "medusa"
    assert record["config"] == {"num_heads": 3, "num_layers": 1, "head": head, "lora_rank": 0}
    assert record["measured"]["predicted mean acceptance length"]["tree"] > 1.1
    text: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with anabranch.load(toys.model, adapter=folder, drafter="medusa:tree=8", dtype="float32") as model:
        wanted = model.generate("the other", drafter="none", **text)
        assert model.generate("the other", **text).token_ids == wanted.token_ids
        for spec in ("medusa:tree=auto", "medusa+suffix"):
            assert model.generate("the other", drafter=spec, **text).token_ids == wanted.token_ids
        sampled = {"temperature": 0.8, "seed": 3, **text}
        wanted = model.generate("the other", drafter="none", **sampled)
        assert model.generate("the other", **sampled).token_ids == wanted.token_ids
    (folder / "adapter.safetensors").write_bytes((folder / "adapter.safetensors").read_bytes()[:-8])
    with pytest.raises(AdapterError, match="truncated or was changed"):
        anabranch.load(toys.model, adapter=folder, dtype="float32")
