"""SPACE: masks are what the target computes of tokens with their embeddings, and drafting with them is exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from anabranch.adapters.folder import WEIGHTS, TargetIdentity, load_adapter, save_adapter
from anabranch.errors import AdapterError, CapabilityError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.methods import make_drafter
from anabranch.methods.space.entry import METHOD, TRAINED, SpaceSettings
from anabranch.methods.space.module import (
    MaskConfig,
    MaskLossOptions,
    MaskModule,
    MaskObjective,
    begin_with,
    start_from_target,
)
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from small import (
    CASES,
    WIDE,
    as_target,
    completions,
    decode,
    decoded_length,
    prompt,
    randomise,
    request,
    small,
    small_adapter,
    train_on,
)
from toy_passes import LENGTHS, PATHS, drafted_states, ragged_trees

MASKS = 3


def masks(target: Decoder, count: int = MASKS) -> MaskModule:
    module = MaskModule(target.config, MaskConfig(count))
    randomise(module, seed=5)
    module.scale.fill_(0.7)
    return module.to(target.dtype).eval().requires_grad_(False)


def as_tokens(target: Decoder, module: MaskModule, text: list[int]) -> torch.Tensor:
    """The target's states of masks that are tokens of its vocabulary [S, D]."""
    wider = copy.deepcopy(target)
    assert module.embeddings is not None
    rows = module.embeddings * module.scale / target.config.embedding_scale
    table = torch.cat((target.embedding.weight, rows))
    wider.embedding = nn.Embedding.from_pretrained(table)  # type: ignore[no-untyped-call]
    cache = Cache(target.config, rows=1, capacity=40, dtype=target.dtype, device=target.device)
    cache.add_row()
    words = [*text, *range(len(target.embedding.weight), len(table))]
    return wider(Inputs.of_prompt(words), cache, need="hidden").hidden_MD[-len(module.embeddings) :]


@pytest.mark.parametrize("case", sorted(CASES))
@torch.no_grad()
def test_masks_are_tokens_behind_the_accepted_node(case: str) -> None:
    target = small(case)
    module = masks(target)
    texts = [
        [*prompt(length, seed=slot), *(int(tree.tokens[node]) for node in path)]
        for slot, (length, tree, path) in enumerate(zip(LENGTHS, ragged_trees(), PATHS, strict=True))
    ]
    ridden, trailed = drafted_states(target, module, "ride"), drafted_states(target, module, "trail")
    for text, mine, other in zip(texts, ridden, trailed, strict=True):
        torch.testing.assert_close(mine, other, atol=3e-5, rtol=1e-4)
        if target.config.sliding_window is None:  # masks see their node's window, a token would see its own
            torch.testing.assert_close(mine, as_tokens(target, module, text), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("placement", ["ride", "trail"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_decoding_is_exact_while_rows_join_and_leave(case: str, placement: str) -> None:
    target = small(case)
    drafter = make_drafter(f"space:nodes=6,placement={placement}", target, masks(target))
    asked = [request(3 + n, n, 6 + 5 * (n % 3)) for n in range(5)]
    asked += [request(4, 9, 12, sampling=SamplingParams(temperature=0.8, seed=3))]
    wanted, _ = decode(target, asked)
    found, steps = decode(target, asked, drafter, rows=3)
    assert found == wanted
    assert {source for row in steps for step in row for source in step.tree.sources} >= {"target", "mask 1", "mask 2"}


@pytest.mark.parametrize("tree", ["chain", "product"])
def test_rejection_samples_from_the_masks(tree: str) -> None:
    target = small()
    drafter = make_drafter(f"space:tree={tree},k=2", target, masks(target))
    asked = [request(5, n, 8, sampling=SamplingParams(temperature=1.0, seed=n), rule="rejection") for n in range(3)]
    found, steps = decode(target, asked, drafter, rows=2)
    assert [len(row) for row in found] == [8, 8, 8]
    assert any(step.tree.draft_probs is not None for row in steps for step in row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_native_kernels_decode_the_same(dtype: torch.dtype) -> None:
    if native.library() is None:
        pytest.skip(f"the native kernels are not available: {native.why_not()}")
    target = build_decoder(replace(WIDE, vocab_size=64), device="cpu")
    randomise(target, seed=1)
    module = masks(target)
    reference = [drafted_states(target, module, "trail"), decode(target, [request(5, 1, 20)])[0]]
    target = target.to(dtype)
    module = masks(target)
    assert pack_decoder(target)
    assert target.backend.kernels is not None
    if dtype == torch.float32:
        for mine, other in zip(drafted_states(target, module, "trail"), reference[0], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)
        assert decode(target, [request(5, 1, 20)])[0] == reference[1]
    asked = [request(3 + n, n, 10 + n) for n in range(4)]
    wanted, _ = decode(target, asked)
    for settings in ("tree=6", "tree=chain", "tree=auto", "nodes=4,placement=ride"):
        assert decode(target, asked, make_drafter(f"space:{settings}", target, module), rows=2)[0] == wanted


def test_combined_with_a_model_free_method_and_with_streams() -> None:
    target = small()
    asked = [request(6, n, 12) for n in range(3)]
    wanted, _ = decode(target, asked)
    modules = (masks(target), small_adapter(target))
    for text in ("space:nodes=6+prompt_lookup", "space:placement=trail+streams:tree=6,placement=trail"):
        assert decode(target, asked, make_drafter(text, target, *modules), rows=2)[0] == wanted


def test_an_adapter_of_masks_serves_only_space() -> None:
    target = small()
    with pytest.raises(CapabilityError, match="'streams' needs an adapter"):
        make_drafter("streams", target, masks(target))
    with pytest.raises(CapabilityError, match="'space' needs an adapter"):
        make_drafter("space", target, small_adapter(target))


@pytest.mark.parametrize("width", [2048, 3072, 4096])
@pytest.mark.parametrize("count", [1, 5])
def test_parameters(width: int, count: int) -> None:
    with torch.device("meta"):
        module = MaskModule(ModelConfig("llama", 32_000, width, 24, 16, 16, 64, 4 * width, 4096), MaskConfig(count))
    assert module.num_parameters() == count * width


def test_training_lowers_the_loss_of_the_masks_alone() -> None:
    target, texts = small(), completions(small(), 5, new=12)
    torch.manual_seed(0)
    module = MaskModule(target.config, MaskConfig(2))
    start_from_target(target, module)
    recipe = TRAINED.training.recipe(given={"num_masks": 2, "stride": 1})
    learner = TRAINED.learn(target, module, recipe, frozen=target)
    assert (learner.predictor, learner.predictors) == ("mask", 2)
    losses = train_on(texts, learner, module, steps=40, lr=5e-2)
    assert losses[-1] < 0.9 * losses[0]
    after = learner.evaluate(texts, nodes=(4,))
    drafter = make_drafter("space:nodes=4", target, module.eval().requires_grad_(False))
    # the replay predicts what decoding reaches
    assert decoded_length(target, texts, drafter) == pytest.approx(after["4 nodes"], abs=0.15)


def test_masks_are_trained_behind_every_nth_position() -> None:
    target = small()
    texts = [Example(tuple(prompt(4, seed=n)), tuple(prompt(15 + n, seed=9 + n))) for n in range(3)]
    batch, module = Batch.of(texts), masks(target)
    every, some = (MaskObjective(target, module, MaskLossOptions(stride=n), segment=6) for n in (1, 3))
    frozen = every.freeze(batch)
    whole, part = ([each.loss(batch, frozen, s) for s in each.segments(batch)] for each in (every, some))
    counts = [float(sum(scores.count_S.sum() for scores in found)) for found in (whole, part)]
    assert every.predictions(batch) == pytest.approx(3 * some.predictions(batch))
    assert 0 < counts[1] < 0.5 * counts[0]
    assert all(torch.isfinite(scores.loss) for scores in part)
    with pytest.raises(InputError, match="stride must be at least 1, got 0"):
        MaskLossOptions(stride=0)


def test_a_folder_gives_back_the_masks(tmp_path: Path) -> None:
    target = as_target(small())
    module = masks(small())
    save_adapter(
        *(tmp_path, module),
        method=METHOD,
        target=TargetIdentity.of(target),
        training={},
        measured={},
        dtype=torch.float32,
    )
    loaded = load_adapter(tmp_path, target)
    assert loaded.method is METHOD
    assert loaded.module.config == module.config
    assert torch.equal(loaded.module.embeddings, module.embeddings)  # type: ignore[arg-type]
    assert torch.equal(loaded.module.scale, module.scale)  # type: ignore[arg-type]
    (tmp_path / WEIGHTS).write_bytes(b"cut")
    with pytest.raises(AdapterError, match="truncated"):
        load_adapter(tmp_path, target)


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="placement must be"):
        make_drafter("space:placement=beside", small(), masks(small()))
    with pytest.raises(InputError, match="only 3 streams"):
        make_drafter("space:depth=4", small(), masks(small()))
    assert SpaceSettings.under_load().adaptive


def test_fresh_masks_are_as_large_as_the_targets_embeddings() -> None:
    for case in ("llama", "gemma2"):
        target = small(case)
        module = MaskModule(target.config, MaskConfig(4))
        start_from_target(target, module)
        wanted = target.embed(torch.arange(19), torch.zeros(19, dtype=torch.long)).std().item()
        assert module.initial(torch.zeros(1, 1, 32)).std().item() == pytest.approx(wanted, rel=0.3)


def test_training_starts_from_fewer_masks() -> None:
    few, many = masks(small(), 2), masks(small(), 4)
    few.scale.fill_(0.2)
    begin_with(many, few)
    assert few.embeddings is not None
    assert many.embeddings is not None
    torch.testing.assert_close(many.embeddings * many.scale, (few.embeddings * few.scale)[[0, 1, 1, 1]])
    with pytest.raises(InputError, match="it has 4 masks"):
        begin_with(few, many)
