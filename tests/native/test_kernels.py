"""The native kernels against plain PyTorch; batch-invariant to the bit, which PyTorch is not."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import small
from anabranch.decoding.engine import Engine, Request
from anabranch.drafting.combined import CombinedDrafter
from anabranch.drafting.drafter import Drafter
from anabranch.drafting.head import DrawNoise, RowVocabulary
from anabranch.methods.none import NoDrafter
from anabranch.methods.prompt_lookup import PromptLookupDrafter
from anabranch.methods.quantized_draft.lead import LeadStreamDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.copying import ALONE, LONGEST, MIXED, MOST, continuations
from anabranch.methods.streams.draft import BLOCKS, StreamDraft, StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.native import NativeTrail
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.rider import trail
from anabranch.model.cache import Cache
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.native_backend import NativeBackend, stack_of
from anabranch.model.native_linear import NativeLinear, Screen
from anabranch.model.pack import pack_decoder
from anabranch.model.quantize import QuantizedWeight, quantize_decoder
from anabranch.model.stack import Stack
from anabranch.native import library as native
from anabranch.native.arguments import BLOCK
from anabranch.sampling import SamplingParams, argmax, gumbels, position_keys
from anabranch.tree import DraftTree
from small import logits_of

needs_kernels = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")

pytestmark = needs_kernels


BASE = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=160,
    max_positions=512,
    rope=RopeConfig(dim=32, max_positions=512),
)


def variant(**changes: object) -> ModelConfig:
    return replace(BASE, **changes)


LAYER_NORM = {"norm": "layer", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
CASES = {
    "llama": BASE,
    "no groups": variant(num_kv_heads=4),
    "one kv head": variant(num_kv_heads=1),
    "wide heads": variant(head_dim=64, rope=RopeConfig(dim=64, max_positions=512)),
    "very wide heads": variant(head_dim=128, num_heads=2, num_kv_heads=1, rope=RopeConfig(dim=128, max_positions=512)),
    "three vectors a head": variant(head_dim=96, rope=RopeConfig(dim=96, max_positions=512)),
    "biases (qwen2)": variant(qkv_bias=True, out_bias=True),
    "normed heads (qwen3)": variant(qk_norm="head"),
    "sliding window (mistral)": variant(sliding_window=9),
    "partly turned": variant(rope=RopeConfig(dim=16, max_positions=512)),
    "tied head": variant(tied_head=True),
    "windows by layer, caps, wide heads (gemma2)": variant(
        head_dim=256,
        rope=RopeConfig(dim=256, max_positions=512),
        num_heads=2,
        num_kv_heads=1,
        norm_plus_one=True,
        post_norms=True,
        activation="gelu_tanh",
        attention_softcap=4.0,
        logit_softcap=3.0,
        sliding_window=9,
        sliding_layers=(True, False, True),
        embedding_scale=8.0,
    ),
    "rotations by layer (gemma3, smollm3)": variant(
        qk_norm="head",
        sliding_window=9,
        sliding_layers=(True, False, False),
        sliding_rope=RopeConfig(theta=100.0, dim=32, max_positions=512),
        rotated_layers=(True, True, False),
        query_scaling=(0.3, 16),
        mlp_bias=True,
    ),
    "norms of all heads and after layers (olmo2), scales (granite)": variant(
        qk_norm="all", pre_norms=False, post_norms=True, residual_scale=0.6, output_scale=0.6, embedding_scale=3.0
    ),
    "learned positions (gpt2)": variant(
        **LAYER_NORM, position="learned", learned_offset=2, gated_mlp=False, activation="gelu_tanh"
    ),
    "parallel (phi)": variant(**LAYER_NORM, wiring="parallel", gated_mlp=False, activation="gelu", head_bias=True),
    "parallel with two norms (neox)": variant(
        **LAYER_NORM, wiring="parallel_two_norms", gated_mlp=False, activation="relu"
    ),
}


RAGGED = ["llama", "one kv head", "sliding window (mistral)", *list(CASES)[-6:]]

TYPES = [torch.bfloat16, torch.float32]
FORMS = ["bfloat16", "compact", "float32", "int8", "int4"]
CACHED = ", int8 cache"  # behind the name of a form: keys and values are in int8


def packed(config: ModelConfig, form: str) -> Decoder:
    """A decoder on the kernels, its weights in one of ``FORMS``."""
    if form.endswith(CACHED):
        model = packed(config, form.removesuffix(CACHED))
        model.quantize_cache()
        return model
    model = decoder(config, torch.float32 if form == "float32" else torch.bfloat16)
    if form in ("int8", "int4"):
        quantize_decoder(model, form)
    if form == "compact":
        of_four_bits(model)
    assert pack_decoder(model)
    assert isinstance(model.backend, NativeBackend)
    return model


MODELS: dict[tuple[str, str], Decoder] = {}


def model_of(name: str, form: str) -> Decoder:
    """A packed decoder of a case, made once."""
    if (name, form) not in MODELS:
        MODELS[name, form] = packed(CASES[name], form)
    return MODELS[name, form]


def of_four_bits(model: Decoder) -> None:
    """Make the weights of bf16 layers those that a Q4_1 file would have."""
    for block in model.blocks:
        for module, name in block.linears():
            weight = getattr(module, name).weight
            weight.copy_(QuantizedWeight.of(weight, "int4").dense())


def stack_in(model: Decoder) -> Stack:
    """All layers of a packed decoder."""
    return stack_of(model.backend)


def decoder(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Decoder:
    """A decoder whose logits are far from uniform."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for name, value in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(value, 0.5, 1.5)
        elif value.dim() == 2:
            torch.nn.init.normal_(value, std=1.5 / value.shape[1] ** 0.5)
        else:
            torch.nn.init.normal_(value, std=0.3)
    return model.to(dtype).eval().requires_grad_(False)


def cache(model: Decoder, rows: int = 1) -> Cache:
    same = {"dtype": model.dtype, "device": model.device, "quantized": model.quantized_cache}
    made = Cache(model.config, rows=rows, capacity=256, **same)
    for _ in range(rows):
        made.add_row()
    return made


def fill(memory: Cache, seed: int) -> None:
    """Write normal noise to all keys and values of a cache."""
    source = torch.Generator().manual_seed(seed)
    for store in (memory.keys, memory.values):
        if memory.quantized:
            e = memory.config.head_dim
            store.copy_(torch.randint(0, 256, store.shape, generator=source))
            scales = torch.rand(*store.shape[:-1], e // 32, generator=source) / 64
            store[..., e:] = scales.view(torch.uint8)
        else:
            store.copy_(torch.randn(store.shape, generator=source))


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, BASE.vocab_size, n).tolist()


def prompt_and_tree(model: Decoder) -> torch.Tensor:
    """The logits of a prompt, and of a tree after it."""
    tree, memory = DraftTree(np.array([5, 7, 9, 11, 13]), np.array([-1, 0, 0, 1, 3])), cache(model)
    first = logits_of(model(Inputs.of_prompt(tokens(40)), memory))
    memory.commit([range(40)])
    return torch.cat((first, logits_of(model(Inputs.of_trees([tree]), memory))), dim=1)


@pytest.mark.parametrize("name", CASES)
def test_layers_agree_with_float32(name: str) -> None:
    """The kernels are at least as near to float32 as PyTorch's bf16 is, prompt and tree alike."""
    plain = decoder(CASES[name])
    exact, packed = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    assert pack_decoder(packed)
    assert isinstance(packed.backend, NativeBackend)
    truth, eager, ours = (prompt_and_tree(model).float() for model in (exact, plain, packed))
    assert (ours - truth).abs().mean() <= 1.05 * (eager - truth).abs().mean()
    assert (ours - truth).abs().max() < 0.25 * truth.std()


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_with_pytorch(name: str) -> None:
    plain = decoder(CASES[name], torch.float32)
    packed = copy.deepcopy(plain)
    assert pack_decoder(packed)
    torch.testing.assert_close(prompt_and_tree(packed), prompt_and_tree(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_tree_is_its_paths_to_the_bit(name: str, form: str, data: st.DataObject) -> None:
    """Each node of any tree has the logits, to the bit, that decoding its path token by token gives."""
    model = model_of(name, form)
    size = data.draw(st.integers(1, 20))
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, size)]
    tree = DraftTree(np.array(tokens(size, size)), np.array(parents))
    prompt = tokens(data.draw(st.integers(1, 40)), 1)
    memory = cache(model)
    model(Inputs.of_prompt(prompt), memory)
    memory.commit([range(len(prompt))])
    wide = logits_of(model(Inputs.of_trees([tree]), memory))
    node = data.draw(st.integers(0, size - 1))
    for step in [*tree.path_to(node)]:
        alone = logits_of(model(Inputs.of_prompt([int(tree.tokens[step])]), memory))
        memory.commit([[0]])
        assert torch.equal(alone[0, 0], wide[0, step])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RAGGED)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_ragged_pass_is_its_rows_to_the_bit(name: str, form: str, data: st.DataObject) -> None:
    """Rows with a number of nodes each, some without any, yield what a pass of each row alone does; and a row without
    nodes keeps its cache.
    """
    model = model_of(name, form)
    stack = stack_in(model)
    counts = data.draw(st.lists(st.sampled_from([0, 1, 2, 5, 9, 20]), min_size=1, max_size=9).filter(any))
    source = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    lengths = [int(source.integers(1, 60)) if count else 7 for count in counts]
    memory = cache(model, rows=len(counts))
    fill(memory, int(source.integers(2**31)))
    before = memory.keys.clone(), memory.values.clone()
    parents = [np.array([int(source.integers(-1, i)) for i in range(count)], np.int64) for count in counts]
    words = [source.integers(0, BASE.vocab_size, count) for count in counts]

    def through(rows: list[int], slot: int) -> tuple[torch.Tensor, ...]:
        step = stack.step([lengths[b] for b in rows], [counts[b] for b in rows], join(parents, rows), 300)
        hidden, chosen, seen = stack.through(join(words, rows), step, memory, slot, need="tokens", taps=(1, 2))
        assert chosen is not None
        return hidden, torch.from_numpy(chosen), seen[1], seen[2]

    together = through([*range(len(counts))], 0)
    after = memory.keys.clone(), memory.values.clone()
    memory.keys.copy_(before[0])
    memory.values.copy_(before[1])
    alone = [through([b], b) for b, count in enumerate(counts) if count]
    for ours, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(parts))
    for found, store in zip(after, (memory.keys, memory.values), strict=True):
        assert torch.equal(found, store)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("count", [3, 150])
def test_a_pass_for_keys_and_values_leaves_those_of_a_whole_one(count: int, name: str, form: str) -> None:
    model, found = model_of(name, form), []
    for need in ("hidden", "keys"):
        memory = cache(model)
        result = model(Inputs.of_prompt(tokens(count)), memory, need=need, taps=(1,))
        assert len(result.hidden_MD) == (count if need == "hidden" else 0)
        found.append((memory.keys[:, 0, :, :count], memory.values[:, 0, :, :count], result.taps[1]))
    assert all(torch.equal(whole, part) for whole, part in zip(*found, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("prefill", [(5,), (69,), (100,), (3, 0, 20), (7, 30, 64)], ids=str)
def test_prompt_tokens_in_the_pass_of_a_step_change_nothing(prefill: tuple[int, ...], name: str, form: str) -> None:
    """Trees after the last tokens of prompts, read in the same pass or in one before: the same to the bit."""
    model, texts = model_of(name, form), [tokens(100)[b:] for b in range(len(prefill))]
    tree = DraftTree(np.array([11, 22, 33, 44]), np.array([-1, 0, 0, 2]))
    found = []
    for together in (prefill, (0,) * len(prefill)):
        memory = cache(model, rows=len(prefill))
        for b, (text, more) in enumerate(zip(texts, together, strict=True)):
            if more < len(text):
                inputs = Inputs.of_prompt(text[: len(text) - more])
                model(inputs, memory, slots=slice(b, b + 1), need="keys")
                memory.commit([range(len(text) - more)])
        behind = [text[len(text) - more :] for text, more in zip(texts, together, strict=True)]
        result = model(Inputs.of_trees([tree] * len(prefill), behind), memory, taps=(1,), need="tokens")
        assert list(result.counts_B) == [4] * len(prefill)
        assert list(result.starts_B) == [4 * b for b in range(len(prefill))]
        parts = [result.hidden_MD, torch.from_numpy(result.tokens_M), result.taps[1]]
        for b, text in enumerate(texts):
            parts += [store[:, b, :, : len(text) + 4] for store in (memory.keys, memory.values)]
        found.append(parts)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def join(parts: list[np.ndarray], rows: list[int]) -> np.ndarray:
    return np.concatenate([parts[b] for b in rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [{"conditioning": "path", "conditioning_rank": 8, "root_width": 32}, {}], ids=str)
def test_streams_of_some_rows_trail_to_the_bit(shape: dict[str, object], form: str) -> None:
    """Rows that take no part change nothing for those that do, whose streams are those of a call of their own."""
    model = packed(CASES["llama"], form)
    trail = NativeTrail(model, adapter_for(model, **shape), 3)
    source = torch.Generator().manual_seed(0)
    memory, main = cache(model, rows=4), torch.randn(9, BASE.hidden_size, generator=source)
    fill(memory, 1)
    memory.lengths[:] = [30, 7, 55, 1]
    nodes, emitted = [1, 2, 4, 6], [5, 6, 7, 8]
    whole = trail.run(main, nodes, emitted, [3] * 4, memory).view(4, 3, -1)
    for counts in ([3, 0, 3, 3], [0, 3, 0, 0], [0, 0, 0, 3]):
        some = trail.run(main, nodes, emitted, counts, memory).view(-1, 3, whole.shape[2])
        assert torch.equal(some, whole[torch.tensor(counts) > 0])


def adapter_for(model: Decoder, vocabulary: torch.Tensor | None = None, **changes: object) -> StreamAdapter:
    torch.manual_seed(3)
    shape = {"num_stream_layers": 2, "stream_mlp": "mlp+adapter", "attention_rank": 4, **changes}
    made = StreamAdapter(model.config, StreamConfig(**shape), vocabulary)
    for value in made.parameters():
        torch.nn.init.normal_(value, std=0.1)
    return made.to(model.dtype).eval().requires_grad_(False)


def in_four_bits(model: Decoder, adapter: StreamAdapter) -> None:
    """Weights that four bits hold, as far as bf16 does, where trailing streams read them in four bits."""

    def held(weight: torch.Tensor) -> torch.Tensor:
        more = -weight.shape[1] % 32
        return QuantizedWeight.of(F.pad(weight, (0, more)), "int4").dense()[:, : weight.shape[1]]

    for index, block in enumerate(model.blocks):
        layer = adapter.layer(index) if index >= adapter.start else None
        for module, name in block.linears():
            weight, delta = getattr(module, name).weight, None if layer is None else layer.delta(name)
            change = 0.0 if delta is None else (delta.up @ delta.down).to(weight.dtype)
            weight.copy_(held(weight + change) - change)
        if layer is not None and layer.mlp is not None:
            layer.mlp.down.copy_(held(layer.mlp.down))
            layer.mlp.up.copy_(held(layer.mlp.up))
    if adapter.root is not None:
        for weight in (adapter.root.main, adapter.root.token, adapter.root.up):
            weight.copy_(held(weight))


ADAPTERS: list[dict[str, object]] = [
    {},
    {"attention_rank": 0},
    {"stream_mlp": "adapter"},
    {"conditioning": "path", "conditioning_rank": 8},
    {"adapter_rank": 40},
    {"adapter_rank": 0},
    {"mlp_rank": 4},
    {"mlp_rank": 4, "attention_rank": 0, "adapter_rank": 0},
    {"root_width": 32},
]


def trailed_in_pytorch(target: Decoder, adapter: StreamAdapter, text: list[int], emitted: int) -> torch.Tensor:
    """The streams [S, D] of a text's last token, computed by PyTorch after the forward pass."""
    memory, layers, last = cache(target), range(adapter.start, target.config.num_layers), len(text) - 1
    main = target(Inputs.of_prompt(text), memory, taps=(adapter.start,)).taps[adapter.start]
    memory.commit([range(len(text))])
    distance, window = last - torch.arange(len(text)), target.config.sliding_window
    seen = {False: distance >= 0, True: (distance >= 0) & (distance < (window or len(text)))}
    found = trail(
        target,
        adapter,
        main[-1][None, None],
        None if adapter.root is None else target.embedding(torch.tensor([[emitted]])),
        torch.tensor([[last]]),
        [(memory.keys[layer, :, :, : len(text)], memory.values[layer, :, :, : len(text)]) for layer in layers],
        [seen[target.config.is_sliding(layer)][None, None] for layer in layers],
        100,
    )
    return found[0, 0]


TRAILED = [(name, shape) for name in ("llama", "sliding window (mistral)") for shape in ADAPTERS]
TRAILED += [(name, {"root_width": 32}) for name in ("learned positions (gpt2)", "parallel (phi)")]


@pytest.mark.parametrize(("name", "shape"), TRAILED, ids=str)
def test_streams_trail_as_in_pytorch(name: str, shape: dict[str, object]) -> None:
    """The kernels compute the streams that PyTorch computes in float32 from the same weights."""
    model = decoder(CASES[name])
    adapter = adapter_for(model, **shape)
    in_four_bits(model, adapter)
    text, emitted = tokens(30), 7
    wanted = trailed_in_pytorch(copy.deepcopy(model).float(), copy.deepcopy(adapter).float(), text, emitted)
    assert pack_decoder(model)
    memory, streams = cache(model), len(wanted)
    main = model(Inputs.of_prompt(text), memory, taps=(adapter.start,)).taps[adapter.start]
    memory.commit([range(len(text))])
    found = NativeTrail(model, adapter, streams).run(main, [len(text) - 1], [emitted], [streams], memory)
    assert found.shape == wanted.shape
    assert F.cosine_similarity(found.float(), wanted, dim=-1).min() > 0.999


# one form of each case in every run, the others in the thorough one; with three rows and with one in turn
QUICK = {("llama", "bfloat16"), ("no groups", "int4"), ("sliding window (mistral)", "float32"), ("tied head", "int8")}
SPECULATING = [
    pytest.param(name, (3, 1)[(i + j) % 2], form, marks=() if (name, form) in QUICK else pytest.mark.thorough)
    for i, name in enumerate(sorted({name for name, _ in QUICK}))
    for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize(("name", "rows", "form"), SPECULATING)
def test_speculation_gives_the_same_tokens(name: str, rows: int, form: str) -> None:
    """In bf16 and quantised too, drafts change nothing."""
    model = packed(CASES[name], form)
    # tokens of the rows' own texts join this vocabulary
    adapter = adapter_for(model, torch.arange(0, 64, 3), conditioning="path", conditioning_rank=32, root_width=32)
    asked = [Request(tokens(4 + 9 * i, i), 24) for i in range(4)]

    def decode(drafter: Drafter, rows: int) -> list[list[int]]:
        return small.decode(model, asked, drafter, rows=rows, capacity=200)[0]

    plain = decode(NoDrafter(), 1)
    assert decode(NoDrafter(), rows) == plain
    assert decode(PromptLookupDrafter(), rows) == plain
    shapes = [StreamSettings(nodes=16), StreamSettings(nodes=40), StreamSettings(tree="chain")]
    shapes += [StreamSettings(tree="product", k=2, depth=2), StreamSettings(nodes=12, condition=False)]
    shapes += [StreamSettings(nodes=16, copy=True)]
    for options in shapes:
        assert decode(StreamDrafter(model, adapter, options), rows) == plain
    assert decode(StreamDrafter(model, adapter, StreamSettings(nodes=24, prune=7)), rows) == plain
    assert decode(StreamDrafter(model, adapter, StreamSettings(nodes=24, prune=7, placement="ride")), rows) == plain
    if form.startswith("bfloat16"):
        cases = [(StreamSettings(nodes=12), 2), (StreamSettings(tree="chain"), 3), (StreamSettings(nodes=2), 2)]
        for options, lead in (*cases, (StreamSettings(nodes=12, copy=True), 2)):
            assert decode(LeadStreamDrafter(model, adapter, options, tokens=lead), rows) == plain
    narrow = adapter_for(model, conditioning="parent", conditioning_rank=8, context_top=5)
    assert decode(StreamDrafter(model, narrow, StreamSettings(nodes=12)), rows) == plain


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 24, 50])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products(outputs: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(outputs)
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((outputs, 70), (outputs,), (rows, 70)))
    linear = NativeLinear(weight, bias, wide=True)
    y = linear(x)
    torch.testing.assert_close(y, x.float() @ weight.float().T + bias.float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(y[-1], linear(x[-1:])[0])
    assert torch.equal(linear.dense(), weight)


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 14, 15, 24, 50, 300])
def test_compact_products_are_those_of_bf16_to_the_bit(outputs: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    random = torch.randn(outputs, 608, generator=generator) * 10.0 ** torch.randint(
        -3, 3, (outputs, 1), generator=generator
    )
    weight = QuantizedWeight.of(random.bfloat16(), "int4").dense().bfloat16()
    bias, x = torch.randn(outputs, generator=generator), torch.randn(rows, 608, generator=generator).bfloat16()
    plain, compact = (NativeLinear(weight, bias, wide=True, compact=choice) for choice in (False, True))
    assert (plain.kind, compact.kind) == ("bfloat16", "compact")
    assert compact.nbytes < 0.32 * plain.nbytes
    assert torch.equal(compact(x), plain(x))
    assert torch.equal(compact.choose(x), plain.choose(x))
    assert torch.equal(compact.dense(), weight)
    narrow = compact.as_int4()
    assert (narrow.kind, narrow.packed.data, compact.kind) == ("int4", compact.packed.data, "compact")
    assert torch.equal(narrow(x), NativeLinear(QuantizedWeight.of(weight, "int4"), bias, wide=True)(x))


def test_compact_layers_are_those_of_bf16_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for expands in (False, True):
        monkeypatch.setattr(native.Library, "expands", expands)
        model = packed(BASE, "compact")
        qkv = model.blocks[0].qkv
        assert (qkv.kind, stack_in(model).kind) == ("compact" if expands else "bfloat16", "bfloat16")
        outputs.append([logits_of(model(Inputs.of_prompt(tokens(n)), cache(model))) for n in (1, 7, 40)])
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_which_weights_are_not_compact() -> None:
    random = torch.randn(64, 64)
    four_bits = QuantizedWeight.of(random.bfloat16(), "int4").dense()
    changed, tiny, infinite = (four_bits.bfloat16() for _ in range(3))
    changed[-1, 5] = changed[-1, 5] * (1 + 2**-7)
    tiny[0, :32] = torch.arange(32) * 1e-40
    infinite[0, 0] = math.inf
    for weight in (random.bfloat16(), changed, tiny, infinite, four_bits, four_bits[:, :48].bfloat16()):
        linear = NativeLinear(weight, None, compact=True)
        assert linear.kind == str(weight.dtype).removeprefix("torch.")
        assert torch.equal(linear.dense(), weight)


def quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows as the kernels take them for a quantised weight: 127 steps for every 32 values."""
    groups = x.float().view(len(x), -1, 32)
    most = groups.abs().amax(2, keepdim=True)
    inverse = torch.full_like(most, 127.0) / most.clamp(min=1e-30)  # not 127 / x, which torch takes as 127 (1 / x)
    return ((groups * inverse).round() * (most / 127)).view(x.shape)


@pytest.mark.parametrize("outputs", [1, 32, 33, 200])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 24, 50])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_products(outputs: int, rows: int, kind: Literal["int8", "int4"]) -> None:
    torch.manual_seed(outputs)
    weight, x, bias = torch.randn(outputs, 96), torch.randn(rows, 96), torch.randn(outputs)
    x[:, :32] *= 30  # a group of its own scale
    x[0, 64:] = 0
    stored = QuantizedWeight.of(weight, kind)
    linear = NativeLinear(stored, bias, wide=True)
    y = linear(x.bfloat16())
    torch.testing.assert_close(y, quantized_rows(x.bfloat16()) @ stored.dense().T + bias, rtol=1e-4, atol=2e-2)
    assert torch.equal(y[-1], linear(x[-1:].bfloat16())[0])
    torch.testing.assert_close(linear.dense().float(), stored.dense(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_layers_agree_with_dense_ones(kind: Literal["int8", "int4"]) -> None:
    """Rows in int8 lose little against float32 rows with the same quantised weights."""
    exact = decoder(BASE, torch.float32)
    quantize_decoder(exact, kind)
    ours = packed(BASE, kind)
    assert (ours.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    outputs = [logits_of(model(Inputs.of_prompt(tokens(40)), cache(model))) for model in (exact, ours)]
    found = F.cosine_similarity(outputs[0], outputs[1].float(), dim=-1).mean()
    assert found > 0.98, found


def test_gate_and_up_in_turn() -> None:
    weight, x = torch.randn(128, 32).bfloat16(), torch.randn(3, 32).bfloat16()
    linear = NativeLinear(weight, None, wide=True, gated=True)
    torch.testing.assert_close(linear(x), x.float() @ weight.float().T, rtol=1e-4, atol=1e-3)
    assert torch.equal(linear.dense(), weight)


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 300), count=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_the_best_log_probabilities(width: int, count: int, seed: int) -> None:
    kernels = native.library()
    count = min(count, width)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(-20, 20, (4, width), generator=generator).float() / 3
    values, places = kernels.best(z, count)
    wanted = z.log_softmax(-1)
    torch.testing.assert_close(values, wanted.topk(count).values, rtol=1e-5, atol=1e-5)
    # of equals the first comes first
    order = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(places, order)


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 300),
    rows=st.integers(1, 33),
    kind=st.sampled_from(["bfloat16", "float32", "int8", "int4"]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_first_of_the_largest(outputs: int, rows: int, kind: str, biased: bool, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    # few different rows, so that many outputs are equal
    weight = torch.randn(5, 64, generator=source)[torch.randint(0, 5, (outputs,), generator=source)]
    weight = weight.to(torch.float32 if kind == "float32" else torch.bfloat16)
    bias = torch.randint(-1, 2, (outputs,), generator=source).to(weight.dtype) if biased else None
    linear = NativeLinear(QuantizedWeight.of(weight, kind) if "int" in kind else weight, bias, wide=True)
    x = torch.randn(rows, 64, generator=source).to(weight.dtype)
    scores = linear(x)
    wanted = [row.index(max(row)) for row in scores.tolist()]
    assert linear.choose(x).tolist() == wanted == argmax(scores).tolist()


@settings(max_examples=150, deadline=None)
@given(
    outputs=st.integers(1, 300),
    rows=st.integers(1, 18),
    kind=st.sampled_from(["bfloat16", "float32"]),
    close=st.sampled_from([0.0, 1e-6, 1e-2, 1.0]),
    scale=st.sampled_from([1e-30, 1e-10, 1.0, 1e10]),
    strange=st.sampled_from([0.0, 1e15, 1e30, float("inf"), float("nan")]),
    seed=st.integers(0, 2**31),
)
def test_a_screen_finds_the_same_token(
    outputs: int, rows: int, kind: str, close: float, scale: float, strange: float, seed: int
) -> None:
    """Outputs that are equal or nearly so, in rows of any size, some with a strange value."""
    source = torch.Generator().manual_seed(seed)
    base = torch.randn(3, 96, generator=source)[torch.randint(0, 3, (outputs,), generator=source)]
    weight = (base + close * torch.randn(outputs, 96, generator=source)).to(getattr(torch, kind))
    linear = NativeLinear(weight, None, wide=True)
    screen = Screen(linear.kernels, weight)
    x = (scale * torch.randn(rows, 96, generator=source)).to(weight.dtype)
    if strange:
        x[0, 50] = strange
    wanted = linear.choose(x)
    assert torch.equal(linear.kernels.choose(x, linear.packed, None, screen.native), wanted)
    if not math.isnan(strange):
        found = linear(x)
        finite = found.isfinite().all(1)
        assert torch.equal(wanted[finite], argmax(found)[finite])


def test_the_bounds_of_a_screen_hold_and_exclude_most_outputs() -> None:
    source = torch.Generator().manual_seed(1)
    weight, x = torch.randn(4096, 256, generator=source), torch.randn(8, 256, generator=source)
    linear = NativeLinear(weight, None, wide=True, screen=True)
    error, size = linear.screen.bounds
    copy = QuantizedWeight.of(weight, "int8").dense()
    scale = x.view(8, -1, 32).abs().amax(2, keepdim=True) / 127
    narrow = ((x.view(8, -1, 32) / scale).round() * scale).view(8, -1)
    bound = x.norm(dim=1)[:, None] * error + (x - narrow).norm(dim=1)[:, None] * size
    approximate, exact = narrow @ copy.T, x @ weight.T
    assert bool(((approximate - exact).abs() < bound).all())
    possible = approximate + bound >= (approximate - bound).amax(1, keepdim=True)
    assert float(possible.float().mean()) < 0.05


@pytest.mark.parametrize("why", ["few outputs", "width", "bias", "nan", "quantised"])
def test_where_there_is_no_screen(why: str) -> None:
    weight = torch.ones(40 if why == "few outputs" else 4096, 40 if why == "width" else 64)
    if why == "nan":
        weight[7, 3] = math.nan
    given = QuantizedWeight.of(weight, "int8") if why == "quantised" else weight
    bias = torch.zeros(4096) if why == "bias" else None
    assert NativeLinear(given, bias, screen=True).screen is None


def noise_in_pytorch(keys: NDArray[np.uint64], tokens: torch.Tensor) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anabranch.sampling.library", lambda: None)
        return gumbels(keys, tokens)


@pytest.mark.parametrize("words", [0, 1, 15, 49_152])
def test_noise_as_in_pytorch(words: int) -> None:
    keys, tokens = position_keys(3, np.arange(40)), torch.arange(2 * words)[::2]
    noise, wanted = gumbels(keys, tokens), noise_in_pytorch(keys, tokens)
    assert noise.shape == wanted.shape
    least = wanted < -2  # of one token in 1,600, none of them drawn: 1 - v has few digits in float32
    torch.testing.assert_close(noise[~least], wanted[~least], rtol=1e-5, atol=1e-5)
    assert bool((noise[least] < -1.99).all())
    if words > 1:
        assert not torch.equal(noise, wanted), "the kernels round otherwise, so that these are theirs"


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 1300),
    rows=st.integers(1, 7),
    temperature=st.sampled_from([1e-30, 0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_draws_as_in_pytorch(width: int, rows: int, temperature: float, seed: int) -> None:
    kernels = native.library()
    source = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, width, generator=source) * 3
    z[:, 1:][torch.rand(rows, width - 1, generator=source) < 0.3] = float("-inf")
    keys = position_keys(seed, torch.randint(0, 4, (rows,), generator=source).numpy())
    drawn = kernels.draw(z, temperature, keys)
    scores = z / temperature + noise_in_pytorch(keys, torch.arange(width))
    # the largest, but for the last digit of the two logarithms
    found = scores.gather(1, drawn[:, None])[:, 0]
    assert bool((found >= scores.amax(-1) - 1e-5 * (1 + scores.amax(-1).abs())).all())


@pytest.mark.parametrize(
    "form", [f if f in ("bfloat16", "int4") else pytest.param(f, marks=pytest.mark.thorough) for f in FORMS]
)
def test_threads_change_nothing(form: str, restored_threads: int) -> None:
    """They take blocks as they come: each block once, whoever does it, so drafts too are the same to the bit."""
    model = packed(BASE, form)
    adapter = adapter_for(model, torch.arange(0, 64, 3), conditioning="path", conditioning_rank=32, root_width=32)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        engine = Engine(model, StreamDrafter(model, adapter, StreamSettings(nodes=16)), rows=2, capacity=200)
        for length in (5, 60):
            engine.add(Request(tokens(length, length), 24))
        steps = list(engine.run())
        assert all(step.tree.log_probs is not None for step in steps)
        found.append([(s.tokens, s.tree.tokens.tolist(), s.tree.log_probs.tolist()) for s in steps])
    assert max(len(drafted) for _, drafted, _ in found[0]) == 16
    assert found[0] == found[1] == found[2]


TREES = [
    StreamSettings(nodes=16),
    StreamSettings(nodes=5, k=3),
    StreamSettings(nodes=40, frontier=3),
    StreamSettings(tree="chain"),
    StreamSettings(depth=2),
    StreamSettings(nodes=30, threshold=0.05),
]
# every kind of tree with each vocabulary and rank, both types and temperatures in turn
DRAFTED = [
    pytest.param(options, *head, temperature, dtype, marks=() if (i + j) % 4 == k else pytest.mark.thorough)
    for i, options in enumerate(TREES)
    for j, head in enumerate(((None, 32), (20, 32), (None, 0), (20, 0)))
    for k, (temperature, dtype) in enumerate(product((0.0, 0.8), TYPES))
]


@pytest.mark.parametrize(("options", "vocabulary", "rank", "temperature", "dtype"), DRAFTED, ids=str)
def test_drafts_as_in_pytorch(
    options: StreamSettings, vocabulary: int | None, rank: int, temperature: float, dtype: torch.dtype
) -> None:
    """The kernels and PyTorch build the same trees, but for candidates that are equally good within int8 and bf16."""
    model = decoder(BASE, dtype)
    ids = None if vocabulary is None else torch.arange(0, 4 * vocabulary, 4)
    torch.manual_seed(5)
    shape = StreamConfig(num_stream_layers=2, conditioning="path" if rank else "none", conditioning_rank=rank)
    adapter = StreamAdapter(model.config, shape, ids).to(dtype).eval().requires_grad_(False)
    for value in adapter.parameters():
        torch.nn.init.normal_(value, std=0.15)
    assert pack_decoder(model)
    draft = StreamDraft(model, adapter, options)
    ours = draft.native
    assert ours is not None
    alike, off, row = 0.0, 0.0, RowVocabulary(draft.head)
    for seed in range(20):
        states = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        row.extend(tokens(3 * seed))
        noise = DrawNoise(temperature, position_keys(seed, np.arange(draft.depth))) if temperature else None
        draft.native = ours
        (mine,) = draft.build(states, [seed], [row], [noise])
        draft.native = None
        (theirs,) = draft.build(states, [seed], [row], [noise])
        assert mine.size == theirs.size or options.threshold
        n = min(mine.size, theirs.size)
        off += float(np.abs(np.sort(mine.log_probs)[-n:] - np.sort(theirs.log_probs)[-n:]).mean())
        paths = [{tuple(t.tokens[list(t.path_to(i))]) for i in range(t.size)} for t in (mine, theirs)]
        alike += len(paths[0] & paths[1]) / n
    assert alike / 20 > (0.75 if dtype == torch.bfloat16 else 0.98)
    assert off / 20 < (0.15 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("rank", [32, 0])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_levels_score_the_blocks_of_a_streams_best_tokens(dtype: torch.dtype, rank: int) -> None:
    """Blocks of 32 tokens; they suffice where streams are not conditioned on paths. A row's own tokens always count."""
    vocabulary = 2 * BLOCK * BLOCKS + 11
    model = decoder(variant(vocab_size=vocabulary + 100), dtype)
    shape = StreamConfig(num_stream_layers=2, conditioning="path" if rank else "none", conditioning_rank=rank)
    adapter = StreamAdapter(model.config, shape, torch.arange(vocabulary)).to(dtype).eval().requires_grad_(False)
    if adapter.conditioner is not None:
        adapter.conditioner.to_state.zero_()
    torch.manual_seed(7)
    # the last block, which is not whole, has tokens that some streams like best; what is behind them is none
    liked = torch.randn(64)
    model.head.weight.copy_(torch.randn(vocabulary + 100, 64) * 0.1)
    model.head.weight[vocabulary - 3 : vocabulary] = liked * torch.tensor([0.3, 0.2, 0.1])[:, None]
    assert pack_decoder(model)
    draft = StreamDraft(model, adapter, StreamSettings(nodes=12))
    row, seen = RowVocabulary(draft.head), set()
    row.extend(range(vocabulary, vocabulary + 40))
    for seed in range(10):
        states = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(seed))
        states[:, seed % 4] += liked
        trees = []
        for blocks in (BLOCKS, 10**6):
            draft.native._config.blocks = blocks
            trees += draft.build(states.to(dtype), [seed], [row])
        some, whole = trees
        assert some.tokens.tolist() == whole.tokens.tolist()
        assert some.parents.tolist() == whole.parents.tolist()
        np.testing.assert_allclose(some.log_probs, whole.log_probs, atol=1e-4)
        seen |= set(some.tokens[1:].tolist())
    assert seen & set(range(vocabulary - 3, vocabulary))
    assert seen & set(range(vocabulary, vocabulary + 40))
    assert len(seen) > 20


def mixture(
    levels: list[dict[int, float]], text: list[int], nodes: int, copy_weight: float
) -> dict[tuple[int, ...], tuple[float, bool]]:
    """The most probable paths after ``text``, their probabilities and whether they are copied, from the formula in
    ``copying`` and each stream's distribution, which no condition changes.
    """
    found: dict[tuple[int, ...], tuple[float, bool]] = {}
    waiting: dict[tuple[int, ...], tuple[float, bool]] = {(): (1.0, False)}
    while waiting and len(found) < nodes:
        path = max(waiting, key=lambda path: waiting[path][0])
        above, _ = found[path] = waiting.pop(path)
        length, shares = continuations(text, path)
        if len(path) < len(levels):
            weight = copy_weight * MIXED[length - 1] if length else 0.0
            for token in {**levels[len(path)], **shares}:
                own, copied = (1 - weight) * levels[len(path)].get(token, 0.0), weight * shares.get(token, 0.0)
                waiting[(*path, token)] = above * (own + copied), copied > own
        else:
            for token, share in shares.items():
                waiting[(*path, token)] = above * copy_weight * ALONE[length - 1] * share, True
    return found


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("seed", range(6))
def test_trees_that_copy_are_those_of_the_formula(form: str, seed: int) -> None:
    model = packed(BASE, form)
    adapter = adapter_for(model, num_streams=3)
    source = np.random.default_rng(seed)
    text = source.integers(3, 3 + int(source.integers(2, 12)), int(source.integers(2, 80))).tolist()
    ahead = source.integers(3, 6, seed % 3).tolist()
    states = torch.randn(3, BASE.hidden_size, generator=torch.Generator().manual_seed(seed)).to(model.dtype)
    nodes, whole = 20, [*text, *ahead]
    plain, copying = (
        StreamDraft(model, adapter, StreamSettings(nodes=nodes, frontier=64, copy=yes)) for yes in (False, True)
    )
    row = copying.row().extend(text)
    row.copy_weight = (1.0, 0.5)[seed % 2]
    best, log_probs = plain.head.best_tokens(states[None], plain.settings.children, [row], levels=slice(0, 3))
    levels = [
        dict(zip(ids, np.exp(logs).tolist(), strict=True))
        for ids, logs in zip(best[0].tolist(), log_probs[0].tolist(), strict=True)
    ]
    (tree,) = copying.build([states], [whole[-1]], [row], ahead=[ahead])
    wanted = mixture(levels, whole, nodes, row.copy_weight)
    assert tree.size == nodes
    np.testing.assert_allclose(
        sorted(np.exp(tree.log_probs)), sorted(p for p, _ in wanted.values()), rtol=2e-3, atol=1e-6
    )
    assert row.copy_weight < 1 or "copy" in tree.sources
    assert ("copy" in tree.sources) == any(copied for _, copied in wanted.values())
    for node in range(1, tree.size):
        path = tuple(int(tree.tokens[i]) for i in tree.path_to(node)[1:])
        if path in wanted:  # all but those that another one ties with
            assert (tree.sources[node] == "copy") == wanted[path][1]
            assert tree.sources[node] in ("copy", f"stream {tree.depths[node]}")


def test_only_best_first_trees_of_greedy_rows_copy() -> None:
    model = packed(BASE, "bfloat16")
    adapter, text = adapter_for(model, num_streams=3), [5, 6, 7, 8] * 6
    states = torch.randn(3, BASE.hidden_size, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    noise = DrawNoise(1.0, position_keys(0, np.arange(3)))
    for options, drawn in ((StreamSettings(nodes=12), noise), (StreamSettings(tree="chain"), None)):
        trees = []
        for yes in (False, True):
            draft = StreamDraft(model, adapter, replace(options, copy=yes))
            trees += draft.build([states], [text[-1]], [draft.row().extend(text)], [drawn])
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
        assert trees[0].sources == trees[1].sources
    drafter = StreamDrafter(model, adapter, StreamSettings(nodes=12, copy=True))
    both = CombinedDrafter([drafter, PromptLookupDrafter()])
    for sampling, sources in ((SamplingParams(), set()), (SamplingParams(temperature=1.0), {"prompt_lookup"})):
        engine = Engine(model, both, capacity=128)
        engine.add(Request(text, 12, sampling))
        trees = [step.tree for step in engine.run()][1:]
        assert {source for tree in trees for source in tree.sources} & {"prompt_lookup"} == sources


def test_the_copied_text_must_end_with_the_root() -> None:
    model = packed(BASE, "bfloat16")
    draft = StreamDraft(model, adapter_for(model, num_streams=3), StreamSettings(nodes=12, copy=True))
    states = torch.randn(3, BASE.hidden_size).to(model.dtype)
    for text, root, why in (([5, 6, 7], 6, "does not end with the root"), ([5, 6, 97, 5, 6], 6, "embedding")):
        row = RowVocabulary(draft.head)
        row.text.extend(text)
        with pytest.raises(AssertionError, match=why):
            draft.build([states], [root], [row])


def test_continuations_follow_the_longest_match() -> None:
    assert continuations([], []) == continuations([4], []) == (0, {})
    assert continuations([1, 2, 3], []) == (0, {})
    assert continuations([1, 2, 3], [1]) == (1, {2: 1.0})
    assert continuations([9, 1, 2, 8, 1, 3, 9], [1]) == (2, {2: 1.0})
    assert continuations([7] * 50, []) == (LONGEST, {7: 1.0})
    assert continuations([5, 1] * 40 + [5, 2] + [5], [])[1] == {2: 1 / MOST, 1: 1 - 1 / MOST}
