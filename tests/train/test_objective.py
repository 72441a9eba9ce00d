"""The loss: against autograd over whole logits, in segments of any size, on streams that are those of decoding."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.decoding.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.learning import loss as loss_module
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary, vocabulary_loss
from anabranch.methods.streams import attention
from anabranch.methods.streams import objective as module
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.objective import RIDING_STRIDE, LossOptions, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.decoder import Decoder
from small import RICH, VOCABULARY, decode, prompt, request, small, small_adapter

PAPER = StreamConfig(num_streams=4, num_stream_layers=2, adapter_rank=3, pruning_rank=2)


def trainable(target: Decoder, config: StreamConfig, vocabulary: Tensor | None = None) -> StreamAdapter:
    return small_adapter(target, config, vocabulary).requires_grad_(True)


def batch() -> Batch:
    """Ragged prompts and completions, one of the least length."""
    sizes = ((5, 9), (1, 2), (3, 14))
    return Batch.of([Example(tuple(prompt(p, p)), tuple(prompt(a, 30 + a))) for p, a in sizes])


def total(objective: StreamObjective, of: Batch) -> Tensor:
    frozen = objective.freeze(of)
    return sum(
        (objective.loss(of, frozen, segment).loss for segment in objective.segments(of)),
        torch.zeros(()),
    )


def gradients(adapter: StreamAdapter) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in adapter.named_parameters() if p.grad is not None}
    adapter.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_vocabulary_loss_is_cross_entropy(
    soft: float, cap: float | None, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", 4)  # several chunks and a rest
    torch.manual_seed(0)
    states = torch.randn(11, 6, requires_grad=True)
    head, teacher = torch.randn(9, 6), torch.randn(11, 6)
    bias = torch.randn(9) if biased else None
    tokens, weight = torch.randint(0, 9, (11,)), torch.rand(11)

    def logits(x: Tensor) -> Tensor:
        z = F.linear(x, head, bias)
        return z if cap is None else torch.tanh(z / cap) * cap

    z = logits(states)
    hard = F.cross_entropy(z, tokens, reduction="none")
    distilled = F.cross_entropy(z, logits(teacher).softmax(-1), reduction="none")
    wanted = (weight * ((1 - soft) * hard + soft * distilled)).sum()
    (gradient,) = torch.autograd.grad(3 * wanted, states)
    words = Vocabulary(head, bias, torch.arange(9))
    found, right = vocabulary_loss(words, states, tokens, weight, teacher if soft else None, soft, cap)
    (mine,) = torch.autograd.grad(3 * found, states)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(mine, gradient, atol=1e-5)
    assert torch.equal(right, z.argmax(-1) == tokens)


@pytest.mark.parametrize("case", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("config", [PAPER, RICH, replace(PAPER, position="rotation")])
def test_segments_of_any_size_are_the_naive_layout(
    case: str, config: StreamConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive layout: the streams of all positions in one attention over the text and all streams, masked."""
    target = small(case)
    adapter = trainable(target, config)
    losses, found = [], []
    for fused, segment in ((10**9, 100), (0, 100), (0, 5), (0, 1), (12, 4)):
        monkeypatch.setattr(attention, "FUSED_ROWS", fused)
        loss = total(StreamObjective(target, adapter, LossOptions(pruning_stride=3), segment=segment), batch())
        loss.backward()
        losses.append(float(loss.detach()))
        found.append(gradients(adapter))
    assert losses[1:] == pytest.approx(losses[:1] * 4, rel=1e-6)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, gradient in other.items():
            assert float((gradient - found[0][name]).norm()) <= 1e-5 * float(found[0][name].norm()), name


def test_the_script_that_measures_segments_compares_the_same_loss() -> None:
    path = Path(__file__).resolve().parents[2] / "research" / "segment_memory.py"
    spec = importlib.util.spec_from_file_location("segment_memory", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    naive, segments = (script.measured(2, 128, layout, 32) for layout in ("naive", "segments"))
    assert naive["loss"] == pytest.approx(segments["loss"], rel=1e-6)
    assert segments["positions_per_second"] > 0
    assert script.mask_bytes(8, 4096) > 15e9


def test_the_pruning_layers_loss_is_the_next_tokens() -> None:
    target = small()
    adapter = trainable(target, PAPER)
    options = LossOptions(pruning=0.5, pruning_stride=1)
    of = batch()
    with_it = total(StreamObjective(target, adapter, options), of)
    without = total(StreamObjective(target, adapter, replace(options, pruning=0.0)), of)
    objective = StreamObjective(target, adapter, options)
    frozen = objective.freeze(of)
    logits = target.logits(target.norm(adapter.early_exit(frozen.entry_BTD)))
    wanted = torch.zeros(())
    for b, (start, length) in enumerate(zip(of.starts_B.tolist(), of.lengths_B.tolist(), strict=True)):
        for t in range(start, length - 2):  # where streams are: the last position has nothing beyond its next token
            wanted = wanted + F.cross_entropy(logits[b, t], of.tokens_BT[b, t + 1])
    assert float((with_it - without).detach()) == pytest.approx(0.5 * float(wanted.detach()), rel=1e-4)


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """sum_j alpha_j CE(stream j) over completion tokens (ACL eq. 6), one position and stream after the other."""
    monkeypatch.setattr(module, "UNCONDITIONED_STRIDE", 1)
    target, options = small(), LossOptions(decay=0.7, soft=0.4, unconditioned=0.2, pruning=0.0)
    adapter = trainable(target, RICH)
    of = batch()
    objective = StreamObjective(target, adapter, options)
    frozen = objective.freeze(of)
    wanted, count = torch.zeros(()), [0] * RICH.num_streams
    for b, (start, length) in enumerate(zip(of.starts_B.tolist(), of.lengths_B.tolist(), strict=True)):
        text = of.tokens_BT[b]
        for t in range(start, length):
            states = objective.states(
                frozen, of.tokens_BT, torch.full((3, 1), t), torch.full((3, 1), t % RIDING_STRIDE == 0)
            )[b, 0]
            carried: Tensor | None = None
            for j in range(1, RICH.num_streams + 1):
                if t + 1 + j >= length:
                    break
                assert adapter.conditioner is not None
                told, carried = adapter.conditioner(states[j - 1], target.embedding(text[t + j]), carried)
                teacher = target.head(frozen.hidden_BTD[b, t + j]).softmax(-1)
                z = target.head(told)
                hard, soft = F.cross_entropy(z, text[t + 1 + j]), F.cross_entropy(z, teacher)
                blind = F.cross_entropy(target.head(states[j - 1]), text[t + 1 + j])
                wanted = wanted + 0.7 ** (j - 1) * (0.6 * hard + 0.4 * soft + 0.2 * blind)
                count[j - 1] += 1
    (segment,) = objective.segments(of)
    scores = objective.loss(of, frozen, segment)
    assert float(scores.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert scores.count_S.tolist() == count


def test_no_gradient_reaches_the_target() -> None:
    target = small("gemma2")
    adapter = trainable(target, RICH)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    total(StreamObjective(target, adapter, LossOptions()), batch()).backward()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in target.parameters())
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    missing = [name for name, parameter in adapter.named_parameters() if parameter.grad is None]
    assert not missing


PLACED = [("ride", RICH), ("trail", RICH), ("ride", replace(RICH, context_top=4))]


@pytest.mark.parametrize("case", ["llama", "gemma2", "mistral", "gpt2", "phi"])
@pytest.mark.parametrize(("placement", "config"), PLACED, ids=["ride", "trail", "top"])
def test_streams_in_training_are_those_of_decoding(case: str, placement: str, config: StreamConfig) -> None:
    target = small(case)
    adapter = small_adapter(target, config)
    asked = request(7, 3, 16)
    ((answer,), _) = decode(target, [asked])
    text = [*asked.prompt_ids, *answer]
    of = Batch.of([Example(tuple(asked.prompt_ids), tuple(answer))])
    objective = StreamObjective(target, adapter, LossOptions())
    frozen = objective.freeze(of)
    drafter = StreamDrafter(target, adapter, StreamSettings(placement=placement))  # type: ignore[arg-type]
    engine = Engine(target, drafter, capacity=64)
    engine.add(Request(asked.prompt_ids, 16))
    row = engine._members[0].row
    at = len(asked.prompt_ids)
    while True:
        (step,) = engine.step()
        at += len(step.tokens)
        if step.finish is not None:
            break
        untold = torch.tensor([[placement == "ride"]])
        with torch.no_grad():
            wanted = objective.states(frozen, of.tokens_BT, torch.tensor([[at - 2]]), untold)[0, 0]
        found = drafter._state(row).states_SD
        assert found is not None
        assert torch.allclose(found, wanted[: len(found)], atol=5e-5)
    assert at == len(text)


def test_a_small_draft_vocabulary_and_the_texts_own_tokens() -> None:
    """The loss is scored over the draft vocabulary and the batch's own tokens."""
    target = small("phi")
    adapter = trainable(target, PAPER, torch.tensor([0, 1, 2]))
    of = batch()
    words = StreamObjective(target, adapter, LossOptions()).vocabulary(of)
    ids = sorted({0, 1, 2, *of.tokens_BT.flatten().tolist()})
    assert torch.equal(words.head_VD, target.head.weight[ids])
    assert words.bias_V is not None
    assert torch.equal(words.bias_V, target.head.bias[ids])
    assert [int(words.place[i]) for i in ids] == list(range(len(ids)))
    assert int((words.place >= 0).sum()) == len(ids) < VOCABULARY


@pytest.mark.parametrize(
    "bad",
    [{"decay": 0.0}, {"decay": 1.5}, {"soft": -0.1}, {"soft": 2.0}, {"unconditioned": -1.0}, {"pruning_stride": 0}],
)
def test_weights_that_mean_nothing(bad: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        LossOptions(**bad)  # type: ignore[arg-type]
