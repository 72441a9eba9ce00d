"""The faster forms that training has of the same arithmetic give the same numbers."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.learning.examples import Example
from anabranch.learning.loss import Vocabulary, vocabulary_loss
from anabranch.methods import Method, methods
from anabranch.methods.streams.attention import row_attention, row_mask, stream_attention
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.mlp import MLP
from anabranch.sampling import SamplingParams, argmax, gumbels, process_logits, target_tokens
from anabranch.train import fit
from anabranch.train.arithmetic import chosen_dtype
from anabranch.train.checkpoint import read_log
from anabranch.train.job import train_adapter
from small import LLAMA, as_target, decode, randomise, request, small

pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")


def test_attention_of_many_rows_is_that_of_few() -> None:
    torch.manual_seed(0)
    b, n, s, length, e = 2, 60, 3, 11, LLAMA.head_dim
    heads, kv = LLAMA.num_heads, LLAMA.num_kv_heads
    qkv = [torch.randn(b, n * s, count, e, requires_grad=True) for count in (heads, kv, kv)]
    keys, values = (torch.randn(b, kv, length, e, requires_grad=True) for _ in range(2))
    leaves = [*qkv, keys, values]
    visible = torch.rand(b, n, length) < 0.6
    visible[:, :, 0] = True
    slope = torch.randn(b, n * s, heads * e)
    config = StreamConfig(num_streams=s, num_stream_layers=1)
    q, k, v = qkv
    wanted = stream_attention(LLAMA, config, (q, k, v), keys, values, visible)
    gradients = torch.autograd.grad(wanted, leaves, slope)
    found = row_attention(LLAMA, (q, k, v), keys, values, row_mask(visible, s, heads // kv, torch.float32))
    torch.testing.assert_close(found, wanted)
    for own, theirs in zip(torch.autograd.grad(found, leaves, slope), gradients, strict=True):
        torch.testing.assert_close(own, theirs)


def test_the_gate_has_the_gradient_of_its_parts() -> None:
    mlp = MLP(replace(LLAMA, mlp_bias=True))
    randomise(mlp, 3)
    x = torch.randn(3, 50, LLAMA.hidden_size, requires_grad=True)
    gate, up = mlp.up(x).chunk(2, dim=-1)
    wanted = mlp.down(torch.nn.functional.silu(gate) * up)
    found = mlp(x)
    torch.testing.assert_close(found, wanted)
    slope = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, x, slope)[0], torch.autograd.grad(wanted, x, slope, retain_graph=True)[0]
    )


def test_a_teacher_that_predictions_share() -> None:
    torch.manual_seed(0)
    states, head, teacher = torch.randn(600, 8, requires_grad=True), torch.randn(13, 8), torch.randn(40, 8)
    tokens, weight, which = torch.randint(0, 13, (600,)), torch.rand(600), torch.randint(0, 40, (600,))
    words = Vocabulary(head, None, torch.arange(13))
    own = vocabulary_loss(words, states, tokens, weight, teacher[which], 0.5)
    shared = vocabulary_loss(words, states, tokens, weight, teacher, 0.5, None, which)
    torch.testing.assert_close(shared[0], own[0])
    torch.testing.assert_close(torch.autograd.grad(shared[0], states)[0], torch.autograd.grad(own[0], states)[0])


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"top_p": 0.999}])
def test_noise_is_needed_only_for_tokens_that_are_left(params: dict[str, float]) -> None:
    sampling = SamplingParams(temperature=1.3, **params)  # type: ignore[arg-type]
    logits = 2 * torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    logits[3, 4] = math.nan
    keys = np.arange(5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    wanted = argmax(process_logits(logits, sampling) + gumbels(keys, torch.arange(3000)))
    assert target_tokens(logits, sampling, keys).tolist() == wanted.tolist()
    assert wanted[3] == -1


def test_a_run_keeps_its_arithmetic() -> None:
    assert chosen_dtype(small(), "stored") == torch.float32
    target = as_target(copy.deepcopy(small()).to(torch.bfloat16))
    assert chosen_dtype(target.decoder, "stored") in (torch.float32, torch.bfloat16)
    for kept in (torch.float32, torch.bfloat16):
        assert chosen_dtype(target.decoder, "stored", {"plan": {"arithmetic": str(kept)}}) == kept
    assert chosen_dtype(target.decoder, "stored", {"plan": {}}) == torch.bfloat16, "a run of an earlier version"


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, id=method.name, marks=() if method.name == "streams" else pytest.mark.thorough)
        for method in methods()
        if method.trained
    ],
)
def test_every_method_learns_the_same_in_either_arithmetic(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = as_target(copy.deepcopy(small()).to(torch.bfloat16))
    asked = [request(2 + n % 7, n, 14) for n in range(26)]
    answers, _ = decode(target.decoder, asked, rows=8)
    pairs = zip(asked, answers, strict=True)
    examples = [Example(tuple(r.prompt_ids), tuple(a)) for r, a in pairs if len(a) > 1]
    assert method.trained is not None
    method = replace(method, trained=replace(method.trained, export=None))  # nothing is written as a model
    assert method.trained is not None
    shape = {"batch_tokens": 90, "held_out": 4, "warmup": 2, "epochs": 2.0}
    shape |= {"stream_layers": 2} if "stream_layers" in method.trained.training.options else {}
    plan = method.trained.training.recipe("small" if "small" in method.trained.training.recipes else None, shape)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(fit, "chosen_dtype", lambda _, form, stored, dtype=dtype: dtype if stored is None else None)
        folder = tmp_path / str(dtype)
        record = train_adapter(target, method, plan, examples, folder, report=lambda _: None)
        assert record["training"]["arithmetic"] == str(dtype).removeprefix("torch.")
        stored = json.loads((folder / "training" / "checkpoint.json").read_text(encoding="utf-8"))
        assert stored["plan"]["arithmetic"] == str(dtype)
        losses.append([line["loss"] for line in read_log(folder / "training")])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
