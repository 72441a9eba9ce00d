"""Shared mode: streams that main rows attend to are part of the target, and drafts change nothing about its text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.certify import certify
from anabranch.certify.compare import last_logits
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.drafting.combined import CombinedDrafter
from anabranch.drafting.drafter import Drafter
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.lookahead import LookaheadDrafter, LookaheadSettings
from anabranch.methods.none import NoDrafter
from anabranch.methods.prompt_lookup import LookupSettings, PromptLookupDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.methods.streams.rider import own_rider
from anabranch.methods.suffix import SuffixDrafter, SuffixSettings
from anabranch.model.backends import TorchBackend
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.kernel_use import kernels_of, near_ties
from anabranch.model.load import Target
from anabranch.model.pack import pack_decoder
from anabranch.model.passes import Rider
from anabranch.model.quantize import quantize_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from shared_layout import LITERAL, Layout
from small import (
    CASES,
    RICH,
    SOME_CASES,
    WIDE,
    as_target,
    decode,
    logits_of,
    prompt,
    randomise,
    request,
    small,
    small_adapter,
)
from test_enumerated import distribution, model

OWN = {"mode": "shared", "main_attends": "own"}
BEST_FORM = replace(RICH, root_width=0, **OWN)  # type: ignore[arg-type]
ROTATION = replace(LITERAL, position="rotation", rotation_step=0.1)
CONDITIONED = replace(LITERAL, conditioning="path", conditioning_rank=5)
CONFIGS = {"literal": LITERAL, "best": BEST_FORM, "rotation": ROTATION}
BEST = StreamSettings(nodes=10, k=4)


def shared(case: str = "llama", config: StreamConfig = BEST_FORM) -> tuple[Decoder, StreamAdapter]:
    """A target whose main rows attend to the streams of the adapter."""
    target = copy.copy(small(case))  # the same weights
    adapter = small_adapter(target, config)
    target.rider = own_rider(target, adapter)
    return target, adapter


def streams(made: tuple[Decoder, StreamAdapter], tree: StreamSettings = BEST, **options: object) -> StreamDrafter:
    return StreamDrafter(*made, replace(tree, **options))  # type: ignore[arg-type]


DRAFTERS: dict[str, Callable[[tuple[Decoder, StreamAdapter]], Drafter]] = {
    "tree": streams,
    "pruned": lambda made: streams(made, prune=5),
    "product": lambda made: streams(made, StreamSettings(tree="product", k=2)),
    "pruned product": lambda made: streams(made, StreamSettings(tree="product", k=2), prune=4),
    "chain": lambda made: streams(made, StreamSettings(tree="chain")),
    "prompt_lookup": lambda made: PromptLookupDrafter(LookupSettings(tokens="5")),
    "suffix": lambda made: SuffixDrafter(SuffixSettings(threshold=0.0)),
    "lookahead": lambda made: LookaheadDrafter(LookaheadSettings(window=4, ngram=4, guesses=4)),
    "combined": lambda made: CombinedDrafter([streams(made), PromptLookupDrafter()], nodes=10),
    "combined, pruned": lambda made: CombinedDrafter([streams(made, prune=5), SuffixDrafter()], nodes=10),
}
# ragged prompts, one of a single token; a short answer leaves in the middle of the others
RAGGED = [request(n, n, new) for n, new in ((9, 18), (1, 5), (14, 18), (4, 11), (7, 18), (2, 13))]
OFTEN = ("tree", "pruned", "product", "prompt_lookup", "combined")
QUICK = [("gemma2", "pruned"), ("gpt2", "tree"), *(("llama", name) for name in OFTEN)]
DECODED = [
    pytest.param(case, name, marks=() if (case, name) in QUICK else pytest.mark.thorough)
    for case in ("gemma2", "gpt2", "llama", "mistral", "phi", "qwen3")
    for name in (DRAFTERS if case in ("gemma2", "llama") else ("tree", "combined"))
]


# -- what the model is ----------------------------------------------------------------------------------------------
LAYOUTS = [
    pytest.param(
        case, name, marks=() if case == "llama" or (case, name) == ("gemma2", "best") else pytest.mark.thorough
    )
    for case in sorted(CASES)
    for name in CONFIGS
]


@pytest.mark.parametrize(("case", "name"), LAYOUTS)
def test_plain_decoding_is_the_naive_layout(case: str, name: str) -> None:
    """Token by token with a cache of main rows, and all rows of the text in one attention with one mask."""
    target, adapter = shared(case, CONFIGS[name])
    asked = request(7, 3, 10, log_probs=True)
    tokens, steps = decode(target, [asked])
    text = [*asked.prompt_ids, *tokens[0]]
    layout = Layout(target, adapter, text, first=len(asked.prompt_ids) - 1)
    wanted = layout.logits().log_softmax(-1)
    found = [log for step in steps[0] for log in step.log_probs or ()]
    at = torch.arange(len(asked.prompt_ids) - 1, len(text) - 1)
    assert torch.allclose(torch.tensor(found), wanted[at, torch.tensor(tokens[0])], atol=1e-4)


def tree() -> DraftTree:
    parents = np.array([-1, 0, 0, 1, 1, 3])
    return DraftTree(np.array(prompt(6, seed=9), np.int64), parents)


def passed(target: Decoder, drafted: Sequence[DraftTree], rider: Rider | None) -> tuple[list[Tensor], Cache, Any]:
    """Logits [N, V] of each tree, after a text of 9 tokens, the last two of which have streams; cache and result."""
    cache = Cache(target.config, rows=len(drafted), capacity=60, dtype=target.dtype, device=target.device)
    for slot in range(len(drafted)):
        cache.add_row()
        for tokens, own in ((prompt(9, seed=5)[:7], None), (prompt(9, seed=5)[7:], target.rider)):
            target(Inputs.of_prompt(tokens), cache, slots=slice(slot, slot + 1), rider=own, need="hidden")
            cache.commit([range(len(tokens))])
    found = target(Inputs.of_trees(drafted), cache, rider=rider)
    return [logits[: each.size] for logits, each in zip(logits_of(found), drafted, strict=True)], cache, found


@pytest.mark.parametrize("case", SOME_CASES)
@torch.inference_mode()
def test_a_nodes_row_is_that_of_its_path_alone(case: str) -> None:
    """In a tree, in a batch and in a chain: the same logits and the same keys and values."""
    target, adapter = shared(case)
    whole, path = tree(), tree().path_to(4)
    chains = [whole.select(np.array(whole.path_to(node))) for node in range(whole.size)]
    together, in_tree, _ = passed(target, [whole, chains[4], chains[0]], target.rider)
    alone = [passed(target, [chain], target.rider)[0][0] for chain in chains]
    for node in range(whole.size):
        assert torch.allclose(together[0][node], alone[node][-1], atol=1e-4)
    assert torch.allclose(together[1], alone[4], atol=1e-4)
    in_tree.commit([path, range(len(path)), [0]])
    end = 9 + len(path)
    for stored in (in_tree.keys, in_tree.values):
        assert torch.allclose(stored[:, 0, :, :end], stored[:, 1, :, :end], atol=1e-4)
    pruned, _, result = passed(target, [whole], StreamDrafter(target, adapter, replace(BEST, prune=3)).needs.rider)
    assert len(result.kept[0]) == 3
    for place, node in enumerate(result.kept[0].tolist()):
        assert torch.allclose(pruned[0][place], alone[node][-1], atol=1e-4)


@torch.inference_mode()
def test_a_main_row_notices_its_own_streams_only() -> None:
    target, adapter = shared()
    (with_streams,), *_ = passed(target, [tree()], target.rider)
    (without,), *_ = passed(target, [tree()], None)
    assert not torch.allclose(with_streams, without, atol=1e-2)
    v1 = StreamAdapter(target.config, replace(BEST_FORM, main_attends="none"), None)
    v1.load_state_dict(adapter.state_dict())
    ridden, *_ = passed(target, [tree()], StreamDrafter(target, v1, StreamSettings(placement="ride")).needs.rider)
    assert torch.allclose(ridden[0], without, atol=1e-5)
    assert own_rider(target, v1) is None


# -- drafts change nothing ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("case", "name"), DECODED)
def test_greedy_output_is_plain_decodings(case: str, name: str) -> None:
    made = shared(case)
    wanted, _ = decode(made[0], RAGGED)
    assert wanted != decode(small(case), RAGGED)[0]
    drafter = DRAFTERS[name](made)
    alone, _ = decode(made[0], RAGGED[:2], drafter)
    assert alone == wanted[:2]
    together, steps = decode(made[0], RAGGED, drafter, rows=4)
    assert together == wanted
    assert max(step.tree.size for row in steps for step in row) > 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN[:2] else pytest.mark.thorough) for name in DRAFTERS]
)
def test_matching_with_a_seed_is_plain_sampling_with_it(name: str) -> None:
    made = shared()
    sampling = SamplingParams(temperature=0.8, top_k=9, top_p=0.95)
    requests = [replace(r, sampling=replace(sampling, seed=i)) for i, r in enumerate(RAGGED)]
    wanted, _ = decode(made[0], requests)
    assert decode(made[0], requests, DRAFTERS[name](made), rows=3)[0] == wanted


def test_rows_with_and_without_drafts_share_passes() -> None:
    made = shared()
    engine = Engine(made[0], rows=4, capacity=96)
    drafters = (NoDrafter(), streams(made), PromptLookupDrafter(), streams(made, StreamSettings(tree="chain")))
    keys = [engine.add(each, drafter) for each, drafter in zip(RAGGED, drafters, strict=False)]
    found: dict[int, list[int]] = {key: [] for key in keys}
    for step in engine.run():
        found[step.row] += step.tokens
    assert list(found.values()) == decode(made[0], RAGGED[:4])[0]


# -- every outcome of every draw ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(StreamSettings(tree="chain"), id="chain", marks=pytest.mark.thorough),
        pytest.param(StreamSettings(tree="product", k=2, depth=1), id="product", marks=pytest.mark.thorough),
    ],
)
def test_rejection_by_enumeration(options: StreamSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of two tokens, over all outcomes of all draws, is that of plain decoding with its streams."""
    target = model(3)
    adapter = small_adapter(target, replace(LITERAL, num_streams=2, num_stream_layers=1))
    target.rider = own_rider(target, adapter)
    found, accepted = distribution(target, StreamDrafter(target, adapter, options), monkeypatch, skipped=1)
    wanted, _ = distribution(target, NoDrafter(), monkeypatch, skipped=1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert 0 < accepted < 1


# -- which tokens have streams --------------------------------------------------------------------------------------
def run_alone(scheduler: Scheduler, asked: Request, drafter: Drafter) -> list[int]:
    ticket = scheduler.submit(asked, drafter)
    return [token for step in scheduler.steps(ticket) for token in step.tokens]


def test_completions_are_not_reused_as_prompts() -> None:
    """A prompt's tokens have no streams, so the keys and values of an earlier completion are not those of a prompt."""
    made = shared()
    scheduler = Scheduler(made[0])
    first = request(20, 1, 20)
    answer = run_alone(scheduler, first, streams(made))
    following = Request([*first.prompt_ids, *answer, *prompt(3, 8)], 12)
    ticket = scheduler.submit(following, streams(made))
    said = [token for step in scheduler.steps(ticket) for token in step.tokens]
    assert ticket.reused == 19
    assert said == decode(made[0], [following])[0][0]


def test_a_row_that_lost_its_cache_has_streams_at_what_it_emitted() -> None:
    made = shared()
    calls = []

    def fails_once(history: Sequence[int], logits_V: Tensor) -> Tensor:
        calls.append(len(history))
        if len(calls) == 9:
            raise ValueError("on purpose")
        return logits_V

    scheduler = Scheduler(made[0])
    wanted = decode(made[0], [RAGGED[0]])[0][0]
    bad = scheduler.submit(replace(RAGGED[2], sampling=SamplingParams(processors=(fails_once,))), NoDrafter())
    good = scheduler.submit(RAGGED[0], streams(made))
    assert [token for step in scheduler.steps(good) for token in step.tokens] == wanted
    assert isinstance(bad.error, ValueError)


# -- what is refused ------------------------------------------------------------------------------------------------
def test_what_does_not_fit_together_is_refused() -> None:
    target, adapter = shared()
    with pytest.raises(CapabilityError, match="streams of this adapter are part of its target"):
        StreamDrafter(small(), adapter)
    with pytest.raises(CapabilityError, match="use placement=ride"):
        StreamDrafter(target, adapter, StreamSettings(placement="trail"))
    other = StreamDrafter(target, small_adapter(target), StreamSettings(placement="ride"))
    with pytest.raises(CapabilityError, match="have the streams of its own adapter already"):
        Engine(target, other).add(RAGGED[0])
    trailing = StreamDrafter(target, small_adapter(target), StreamSettings(placement="trail"))
    assert decode(target, RAGGED[:2], trailing)[0] == decode(target, RAGGED[:2])[0]
    for options, reason in (
        ({"main_attends": "own"}, "mode 'lossless' keeps it as it is; use mode 'shared'"),
        ({"lora_rank": 2}, "use mode 'shared'"),
        ({**OWN, "root_width": 4}, "root_width is 4, but streams that main rows attend to"),
        ({"mode": "joint"}, "mode must be one of lossless, shared, got 'joint'"),
    ):
        with pytest.raises(InputError, match=reason):
            StreamConfig(**options)  # type: ignore[arg-type]


# -- near-ties and kernels ------------------------------------------------------------------------------------------
def packed(
    config: StreamConfig, dtype: torch.dtype = torch.bfloat16, quantize: str = "none"
) -> tuple[Target, StreamAdapter]:
    """A target of sizes that the native kernels take, packed for them where they can be built."""
    decoder = build_decoder(WIDE, device="cpu")
    randomise(decoder, seed=1, scale=0.15)
    decoder.to(dtype)
    adapter = small_adapter(decoder, config).to(dtype)
    if quantize != "none":
        quantize_decoder(decoder, quantize)
    decoder.rider = own_rider(decoder, adapter)
    pack_decoder(decoder)
    return as_target(decoder), adapter


needs_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels cannot be built here")
PROMPTS = [prompt(n, seed=n) for n in (5, 9, 3)]
SPECS = {"streams": 1, "streams:prune=4": 3, "streams:tree=chain": 2, "streams+prompt_lookup": 4, "prompt_lookup": 3}


@needs_kernels
@pytest.mark.parametrize(
    ("config", "quantize"),
    [
        pytest.param(LITERAL, "none", id="own"),
        pytest.param(replace(LITERAL, main_attends="none"), "none", id="v1", marks=pytest.mark.thorough),
        pytest.param(LITERAL, "int8", id="int8", marks=pytest.mark.thorough),
        pytest.param(CONDITIONED, "int4", id="int4", marks=pytest.mark.thorough),
        pytest.param(BEST_FORM, "none", id="weights"),
        pytest.param(BEST_FORM, "int8", id="weights, int8", marks=pytest.mark.thorough),
    ],
)
def test_with_the_native_kernels_bf16_is_exact_to_the_bit(config: StreamConfig, quantize: str) -> None:
    """The kernels run streams together with their nodes, with weights of their own too."""
    target, adapter = packed(config, quantize=quantize)
    for spec, rows in SPECS.items():
        found = certify(target, [adapter], spec, PROMPTS, max_new_tokens=16, rows=rows)
        assert [each.verdict for each in found] == ["equal"] * len(PROMPTS)
    assert kernels_of(target.decoder).why == ""
    if target.decoder.rider is not None:
        whole = tree()
        chains = [whole.select(np.array(whole.path_to(node))) for node in range(whole.size)]
        together, *_ = passed(target.decoder, [whole, chains[4]], target.decoder.rider)
        for node, chain in enumerate(chains):
            (alone,), *_ = passed(target.decoder, [chain], target.decoder.rider)
            assert torch.equal(together[0][node], alone[-1])


@needs_kernels
@torch.inference_mode()
def test_the_native_kernels_compute_what_pytorch_does() -> None:
    target, adapter = packed(LITERAL, torch.float32)
    assert target.decoder.backend.kernels is not None
    plain = copy.copy(target.decoder)
    plain.backend = TorchBackend()
    for each in (target.decoder, plain):
        each.rider = own_rider(each, adapter)
    found, cache, _ = passed(target.decoder, [tree(), tree()], target.decoder.rider)
    wanted, other, _ = passed(plain, [tree(), tree()], plain.rider)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    assert torch.allclose(cache.keys[:, 0, :, :15], other.keys[:, 0, :, :15], atol=1e-4)


def test_without_them_bf16_differs_at_ties_only() -> None:
    """The kernels attend to the whole context only."""
    target, adapter = packed(replace(BEST_FORM, context_top=3))
    for spec in ("streams", "streams:prune=4"):
        found = certify(target, [adapter], spec, PROMPTS, max_new_tokens=16, rows=3)
        assert {each.verdict for each in found} <= {"equal", "tie"}
    if target.decoder.backend.kernels is not None:
        why = "main rows attend to rows of the adapter in layers 2 to 3, so PyTorch runs these"
        assert why in kernels_of(target.decoder).why
        assert near_ties(target.decoder) == kernels_of(target.decoder).why
    target.decoder.rider = None
    assert "rows of the adapter" not in kernels_of(target.decoder).why
    if target.decoder.backend.kernels is not None:
        assert near_ties(target.decoder) == ""
    target.decoder.backend = TorchBackend()
    assert "PyTorch runs this model" in near_ties(target.decoder)
    assert near_ties(packed(LITERAL, torch.float32)[0].decoder) == ""


def test_certify_notices_another_model() -> None:
    """Its reference is plain decoding with the streams: a text without them is a BUG, and no tie."""
    target, adapter = packed(BEST_FORM)
    decoder = target.decoder
    text = prompt(9, seed=2)
    with_streams = last_logits(target, text, 3, prompt=7)
    decoder.rider = None
    without = last_logits(target, text, 3, prompt=7)
    decoder.rider = own_rider(decoder, adapter)
    assert (with_streams - without).abs().max() > 0.05
