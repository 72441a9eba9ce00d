"""Tuning the target together with what drafts for it: low-rank terms on all linear layers (LoRA, Hu et al. 2022).

The tuned target is a model of its own: its layers with the terms merged into them. Speculation reproduces its plain
decoding, not the original target's.

B rows, T text length, P positions, K kv heads, E head width, D model width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch
from anabranch.learning.loss import Vocabulary, VocabularyLoss
from anabranch.learning.objective import Segment
from anabranch.learning.recompute import through
from anabranch.methods.low_rank import LowRank
from anabranch.model.blocks import MLP, Block, attention
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.families import weight_source
from anabranch.model.load import Target, load_target
from anabranch.model.nf4 import Nf4Linear
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import read_json

__all__ = [
    "MOST_RANK",
    "LayerTuning",
    "TunedPass",
    "Tuning",
    "check_tunable",
    "export_tuned",
    "next_token_loss",
    "save_tuned",
    "terms_of",
    "tuned_pass",
]

MOST_RANK = 1024


class Tuning(Protocol):
    """A trained module that may have terms for the layers of its target.

    config  has ``lora_rank``, 0 without terms
    tuning  a ``LayerTuning`` for each layer, or None
    """

    config: Any
    vocabulary: Tensor
    tuning: nn.ModuleList | None


M = TypeVar("M", bound=Tuning)


class LayerTuning(nn.Module):
    """The terms of one layer, a ``RowSide``: at zero the layer is the target's."""

    def __init__(self, model: ModelConfig, rank: int) -> None:
        super().__init__()
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        width, inner = model.hidden_size, model.intermediate_size
        self.terms = nn.ModuleDict(
            {
                "qkv": LowRank(width, q + 2 * kv, rank),
                "out": LowRank(q, width, rank),
                "up": LowRank(width, inner * (2 if model.gated_mlp else 1), rank),
                "down": LowRank(inner, width, rank),
            }
        )

    def _added(self, name: str, linear: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = linear(x) + self.terms[name](x)
        return found

    def qkv(self, h_BRD: Tensor, qkv: nn.Module) -> Tensor:
        """The fused query, key and value projections."""
        return self._added("qkv", qkv, h_BRD)

    def out(self, a: Tensor, out: nn.Module) -> Tensor:
        """The attention's output projection."""
        return self._added("out", out, a)

    def mlp(self, h_BRD: Tensor, mlp: MLP) -> Tensor:
        """The feed-forward part."""
        y = self._added("up", mlp.up, h_BRD)
        if mlp.gated:
            gate, y = y.chunk(2, dim=-1)
            return self._added("down", mlp.down, mlp.activation(gate) * y)
        return self._added("down", mlp.down, mlp.activation(y))

    def merge(self, block: Block) -> None:
        """Add the terms to a block's weights."""
        for name, linear in _linears(block):
            term = self.terms[name]
            assert isinstance(term, LowRank)
            with torch.no_grad():
                whole = linear.weight.float() + (term.up @ term.down).float().to(linear.weight.device)
                linear.weight.copy_(whole)


def _linears(block: Block) -> Iterator[tuple[str, nn.Linear]]:
    for name, linear in (("qkv", block.qkv), ("out", block.out), ("up", block.mlp.up), ("down", block.mlp.down)):
        assert isinstance(linear, nn.Linear)
        yield name, linear


def terms_of(model: ModelConfig, rank: int) -> nn.ModuleList | None:
    """Terms of a rank for every layer; None for rank 0."""
    return nn.ModuleList(LayerTuning(model, rank) for _ in range(model.num_layers)) if rank else None


@dataclass(frozen=True)
class TunedPass:
    """What the tuned target computes of a batch, with gradients for the terms.

    hidden_BTD   states after the last norm
    keys_values  of each layer, [B, K, T, E]
    """

    hidden_BTD: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


def tuned_pass(target: Decoder, layers: nn.ModuleList, tokens_BT: Tensor) -> TunedPass:
    """Run the tuned target over a batch."""
    config, (rows, length) = target.config, tokens_BT.shape
    positions_BT = torch.arange(length, device=tokens_BT.device).expand(rows, length)
    # copies: tables that a pass made in inference mode take no part in gradients
    cos, sin = (turn.clone().to(target.dtype) for turn in target.rope()(positions_BT, length))
    behind = positions_BT[0, :, None] - positions_BT[0]
    groups = config.num_heads // config.num_kv_heads

    def bias(window: int | None) -> Tensor:
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        whole = torch.zeros(length, length, dtype=target.dtype, device=tokens_BT.device)
        return whole.masked_fill(hidden, float("-inf")).repeat(groups, 1)[None, None]

    biases = {sliding: bias(config.sliding_window if sliding else None) for sliding in (False, True)}

    def layer(x: Tensor, block: nn.Module, side: nn.Module, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own.extend((k.transpose(1, 2), v.transpose(1, 2)))
            return attention(config, q, own[0], own[1], mask.to(q.dtype))

        x = block(x, cos, sin, attend, side)
        return x, own[0], own[1]

    kept: list[tuple[Tensor, Tensor]] = []
    x = target.embed(tokens_BT, positions_BT)
    for index, (block, side) in enumerate(zip(target.blocks, layers, strict=True)):
        x, *pair = through(partial(layer, block=block, side=side, mask=biases[config.is_sliding(index)]), x)
        kept.append((pair[0], pair[1]))
    return TunedPass(target.norm(x), kept)


def next_token_loss(
    target: Decoder, batch: Batch, tuned_BTD: Tensor, frozen_BTD: Tensor, segment: Segment, soft: float
) -> Tensor:
    """The loss of the tuned target's own next token, summed over the positions of a segment.

    frozen_BTD  the original target's states after the last norm, to distil from
    soft        share of the original target's distribution in the loss; the rest is the completion's token
    """
    tokens_BT, (positions_BP, real_BP) = batch.tokens_BT.to(target.device), segment
    rows_M = torch.arange(batch.size, device=tokens_BT.device)[:, None].expand_as(positions_BP)[real_BP]
    at_M = positions_BP[real_BP]
    words = Vocabulary.of(target, torch.arange(target.config.vocab_size, device=tokens_BT.device), tokens_BT)
    found: tuple[Tensor, Tensor] = VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        tuned_BTD[rows_M, at_M],
        words.head_VD,
        words.bias_V,
        words.place[tokens_BT[rows_M, at_M + 1]],
        torch.ones(len(at_M), device=tokens_BT.device),
        frozen_BTD[rows_M, at_M] if soft else None,
        soft,
        target.config.logit_softcap,
    )
    return found[0]


# -- the tuned target as a model folder --------------------------------------------------------------------
def check_tunable(target: Decoder) -> None:
    """Raise CapabilityError where a target cannot be tuned, or not be written as a model folder."""
    config = target.config
    block = target.blocks[0]
    assert isinstance(block, Block)
    if not isinstance(block.qkv, nn.Linear | Nf4Linear):
        raise CapabilityError("a quantised target cannot be tuned; load it with quantize='none', or use lora_rank=0")
    names = [name for name, _ in target.named_parameters()]
    if any(weight_source(config, name).layout != "rows" for name in names):
        raise CapabilityError(
            f"tuned targets of the family {config.family!r} cannot be written as a model folder; use lora_rank=0"
        )


def save_tuned(folder: Path, layers: nn.ModuleList, target: Target) -> Target:
    """Write the tuned target as a folder that ``anabranch.load`` reads, and load it."""
    described = _described(target)
    decoder = copy.deepcopy(target.decoder).cpu()
    for block, side in zip(decoder.blocks, layers, strict=True):
        assert isinstance(block, Block)
        assert isinstance(side, LayerTuning)
        side.merge(block)
    config = decoder.config
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors: dict[str, Tensor] = {}
    for name, parameter in sorted(decoder.named_parameters()):
        names = [alternatives[0] for alternatives in weight_source(config, name).tensors]
        sizes = {1: [len(parameter)], 2: [len(parameter) // 2] * 2, 3: [q, kv, kv]}[len(names)]
        parts = torch.split(parameter.detach(), sizes)
        tensors.update((each, part.clone()) for each, part in zip(names, parts, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    target.tokenizer.save_pretrained(folder)
    write_atomically(folder / "config.json", json.dumps(described, indent=2) + "\n")
    return load_target(str(folder), dtype=target.decoder.dtype, device=str(target.decoder.device))


def export_tuned(folder: Path, module: M, target: Target) -> tuple[M, Target] | None:
    """Write the tuned target as a model folder; ``Trained.export``. None if the target was frozen."""
    if module.tuning is None:
        return None
    tuned = save_tuned(folder, module.tuning, target)
    made: Any = type(module)
    alone = made(target.config, replace(module.config, lora_rank=0), module.vocabulary)
    weights: dict[str, Tensor] = module.state_dict()  # type: ignore[attr-defined]
    alone.load_state_dict({name: x for name, x in weights.items() if not name.startswith("tuning.")})
    return alone, tuned


def _described(target: Target) -> dict[str, Any]:
    """config.json of the tuned target: what the target's own folder or .gguf file says, and the type of the weights."""
    assert target.path is not None, "a target that is tuned was loaded from somewhere"
    if target.path.is_file():
        from anabranch.model.gguf import read_gguf

        described = dict(read_gguf(target.path).config)
    else:
        described = read_json(target.path / "config.json", "fetch or copy the model again")
    stored = str(target.decoder.dtype).removeprefix("torch.")
    return {**described, "torch_dtype": stored, "eos_token_id": list(target.config.eos_token_ids)}
