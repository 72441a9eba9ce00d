"""Tuning the target together with what drafts for it: low-rank terms on all linear layers (LoRA, Hu et al. 2022).

The tuned target is a model of its own: its layers with the terms merged into them. Speculation reproduces its plain
decoding, not the original target's.

B rows, T text length, P positions, K kv heads, E head width, D model width.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from safetensors.torch import save
from torch import Tensor, nn

from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.loss import Vocabulary, VocabularyLoss
from anabranch.learning.objective import Segment, segments
from anabranch.learning.recompute import through
from anabranch.methods.terms import LayerTuning, lora_of
from anabranch.model.blocks import Attend, Block, attention
from anabranch.model.decoder import Decoder
from anabranch.model.families import module_rows, weight_source
from anabranch.model.int8_training import Int8Linear
from anabranch.model.load import Target, base_name, load_target
from anabranch.model.needs import KEY
from anabranch.model.nf4 import Nf4Linear
from anabranch.model.peft import write_lora
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import read_json

__all__ = [
    "TextPass",
    "TunedPass",
    "Tunes",
    "Tuning",
    "check_tunable",
    "check_weights",
    "export_tuned",
    "next_token_loss",
    "next_token_quality",
    "next_token_scores",
    "save_tuned",
    "tuned_pass",
]


class Tuning(Protocol):
    """A trained module that may have terms for the layers of its target.

    config  has ``lora_rank``, 0 without terms
    tuning  a ``LayerTuning`` for each layer, or None
    """

    config: Any
    vocabulary: Tensor
    tuning: nn.ModuleList | None


M = TypeVar("M", bound=Tuning)
GENERATION = "generation_config.json"


class TextPass:
    """A pass over whole texts [B, T] in PyTorch, with gradients: rotations, causal masks, and what layers computed.

    keys_values  of each layer that has run, [B, K, T, E]
    """

    def __init__(self, target: Decoder, tokens_BT: Tensor) -> None:
        self.target, (rows, length) = target, tokens_BT.shape
        self.positions_BT = torch.arange(length, device=tokens_BT.device).expand(rows, length)
        self.rotations = self.rotated(self.positions_BT)
        self.keys_values: list[tuple[Tensor, Tensor]] = []
        behind = self.positions_BT[0, :, None] - self.positions_BT[0]
        window = target.config.sliding_window
        self._biases = {False: self._bias(behind < 0)}
        if window is not None:
            self._biases[True] = self._bias((behind < 0) | (behind >= window))

    def rotated(self, positions_BR: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of some positions; copies, since tables made in inference mode take no part in gradients."""
        rows, length = self.positions_BT.shape
        cos, sin = self.target.rope()(positions_BR, length, [length] * rows)
        return cos.clone().to(self.target.dtype), sin.clone().to(self.target.dtype)

    def _bias(self, hidden_TT: Tensor) -> Tensor:
        groups = self.target.config.num_heads // self.target.config.num_kv_heads
        whole = torch.zeros(hidden_TT.shape, dtype=self.target.dtype, device=hidden_TT.device)
        return whole.masked_fill(hidden_TT, float("-inf")).repeat(groups, 1)[None, None]

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of a layer; keeps its keys and values."""
        self.keys_values.append((k.transpose(1, 2), v.transpose(1, 2)))
        return self._attention(index, q, *self.keys_values[-1])

    def _attention(self, index: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        config = self.target.config
        return attention(config, q, keys, values, self._biases[config.is_sliding(index)].to(q.dtype))

    def layer(self, index: int, x_BTD: Tensor, side: nn.Module, attend: Attend | None = None) -> Tensor:
        """One layer with the terms ``side``; ``attend`` takes the place of ``self.attend``."""
        block = self.target.blocks[index]
        if attend is not None:
            found: Tensor = block(x_BTD, *self.rotations, attend, side)
            return found

        def whole(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            own: list[Tensor] = []

            def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                own.extend((k.transpose(1, 2), v.transpose(1, 2)))
                return self._attention(index, q, own[0], own[1])

            x = block(x, *self.rotations, look, side)
            return x, own[0], own[1]

        out: Tensor
        out, keys, values = through(whole, x_BTD)
        self.keys_values.append((keys, values))
        return out


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
    run = TextPass(target, tokens_BT)
    x = target.embed(tokens_BT, run.positions_BT)
    for index, side in enumerate(layers):
        x = run.layer(index, x, side)
    return TunedPass(target.norm(x), run.keys_values)


def next_token_loss(
    target: Decoder, batch: Batch, tuned_BTD: Tensor, frozen_BTD: Tensor | None, segment: Segment, soft: float
) -> Tensor:
    """The loss of the tuned target's own next token, summed over the positions of a segment.

    frozen_BTD  the original target's states after the last norm, to distil from; None: nothing is distilled
    soft        share of the original target's distribution in the loss; the rest is the completion's token
    """
    return next_token_scores(target, batch, tuned_BTD, segment, frozen_BTD if soft else None, soft)[0]


def next_token_scores(
    target: Decoder,
    batch: Batch,
    tuned_BTD: Tensor,
    segment: Segment,
    frozen_BTD: Tensor | None = None,
    soft: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As ``next_token_loss``, and which of the M predictions of a segment are right [M]."""
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
        None if frozen_BTD is None or not soft else frozen_BTD[rows_M, at_M],
        soft,
        target.config.logit_softcap,
    )
    return found


@runtime_checkable
class Tunes(Protocol):
    """The part of an objective that tunes the target with what drafts for it."""

    target: Decoder

    def tuned_states(self, batch: Batch) -> Tensor:
        """The tuned target's states after the last norm [B, T, D], at least from the last token of each prompt on."""


@torch.no_grad()
def next_token_quality(
    target: Decoder, states: Callable[[Batch], Tensor], examples: Sequence[Example], *, rows: int = 16
) -> dict[str, float]:
    """The loss a token, and the share of right tokens, of a target on completions; ``states`` runs it: [B, T, D]."""
    loss = right = count = 0.0
    order = sorted(examples, key=len)
    for first in range(0, len(order), rows):
        batch = Batch.of(order[first : first + rows])
        states_BTD = states(batch)
        for segment in segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=target.device):
            summed, right_M = next_token_scores(target, batch, states_BTD, segment)
            loss, right, count = loss + float(summed), right + float(right_M.sum()), count + len(right_M)
    return {"loss": round(loss / count, 4), "accuracy": round(right / count, 4)}


# -- the tuned target as a model folder --------------------------------------------------------------------
def check_weights(target: Decoder) -> None:
    """Raise CapabilityError for a target whose weights are quantised, other than for the time of a training."""
    block = target.blocks[0]
    assert isinstance(block, Block)
    if not isinstance(block.qkv, nn.Linear | Nf4Linear | Int8Linear):
        raise CapabilityError("a quantised target cannot be tuned; load it with quantize='none'")


def check_tunable(target: Decoder) -> None:
    """Raise CapabilityError where a target cannot be tuned, or not be written as a model folder."""
    check_weights(target)
    config = target.config
    names = [name for name, _ in target.named_parameters()]
    if any(weight_source(config, name).layout != "rows" for name in names):
        raise CapabilityError(
            f"tuned targets of the family {config.family!r} cannot be written as a model folder; use lora_rank=0"
        )


def save_tuned(folder: Path, layers: nn.ModuleList, target: Target, *, needs: str = "") -> Target:
    """Write the tuned target as a folder that ``anabranch.load`` reads, and load it.

    needs  the method whose adapter is part of the tuned model; empty: none
    """
    described = {**_described(target), **({KEY: needs} if needs else {})}
    decoder = copy.deepcopy(target.decoder).cpu()
    for block, side in zip(decoder.blocks, layers, strict=True):
        assert isinstance(block, Block)
        assert isinstance(side, LayerTuning)
        side.merge(block)
    tensors: dict[str, Tensor] = {}
    for name, parameter in sorted(decoder.named_parameters()):
        names = [alternatives[0] for alternatives in weight_source(decoder.config, name).tensors]
        parts = torch.split(parameter.detach(), module_rows(decoder.config, len(names), len(parameter)))
        tensors.update((each, part.clone()) for each, part in zip(names, parts, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    target.tokenizer.save_pretrained(folder)
    if target.path is not None and (target.path / GENERATION).is_file():
        shutil.copyfile(target.path / GENERATION, folder / GENERATION)
    write_atomically(folder / "config.json", json.dumps(described, indent=2) + "\n")
    return load_target(str(folder), dtype=target.decoder.dtype, device=str(target.decoder.device))


def export_tuned(folder: Path, module: M, target: Target) -> tuple[M, Target] | None:
    """Write the tuned target as a model folder; ``Trained.export``. None if the target was frozen.

    The terms alone are written too, as a LoRA in PEFT's format in the folder ``lora`` beside it; not where the target
    itself has a LoRA, since they belong to the merged weights.
    """
    if module.tuning is None:
        return None
    needs = "streams" if getattr(module.config, "main_attends", "none") == "own" else ""
    tuned = save_tuned(folder, module.tuning, target, needs=needs)
    if target.lora is None:
        lora = lora_of(target.config, module.tuning)
        write_lora(folder.with_name("lora"), lora, base=base_name(target), needs=needs)
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
    return {
        **described,
        "torch_dtype": stored,
        "tie_word_embeddings": target.config.tied_head,
        "eos_token_id": list(target.config.eos_token_ids),
    }
