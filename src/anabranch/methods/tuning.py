"""Tuning the target together with what drafts for it: low-rank terms on all linear layers (LoRA, Hu et al. 2022).

The tuned target is a model of its own: its layers with the terms merged into them. Speculation reproduces its plain
decoding, not the original target's.

B rows, T text length, P positions, K kv heads, E head width, D model width.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example, grouped
from anabranch.learning.loss import Vocabulary, vocabulary_loss
from anabranch.learning.objective import Scores, Segment, segments
from anabranch.learning.recompute import through
from anabranch.learning.target import Keeping, RunTarget, TargetStates, frozen_target
from anabranch.methods.terms import lora_of
from anabranch.model.blocks import Attend, Block, attention
from anabranch.model.checkpoint import read_checkpoint
from anabranch.model.config import NEEDS
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config, module_rows, weight_source
from anabranch.model.load import Target, base_name, load_target
from anabranch.model.lora import with_lora
from anabranch.model.peft import read_lora, write_lora
from anabranch.model.stored import Checkpoint
from anabranch.model.training_formats import Int8Linear, Nf4Linear
from anabranch.model.weights import fill_decoder
from anabranch.support.files import write_atomically

__all__ = [
    "QUALITY",
    "TextPass",
    "TunedObjective",
    "TunedTarget",
    "check_tunable",
    "check_weights",
    "export_tuned",
    "next_token_quality",
    "next_token_scores",
    "save_tuned",
    "tuned_pass",
    "write_model",
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
QUALITY = "next token"  # loss and accuracy of a tuned target, in evaluations


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
            result: Tensor = block(x_BTD, *self.rotations, attend, side)
            return result

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


def tuned_pass(
    target: Decoder, layers: nn.ModuleList, tokens_BT: Tensor, *, taps: Sequence[int] = (), keys_from: int | None = None
) -> TargetStates:
    """Run the tuned target over a batch, with gradients for the terms; as ``run_frozen``."""
    run = TextPass(target, tokens_BT)
    x, tapped = target.embed(tokens_BT, run.positions_BT), {}
    for index, side in enumerate(layers):
        if index in taps:
            tapped[index] = x
        x = run.layer(index, x, side)
    return TargetStates(target.norm(x), tapped, run.keys_values[keys_from:] if keys_from is not None else [])


class TunedTarget:
    """Runs a target with its terms; a ``RunTarget`` for objectives of what drafts for it."""

    def __init__(self, target: Decoder, layers: nn.ModuleList) -> None:
        self.target, self.layers = target, layers

    def __call__(self, batch: Batch, *, taps: Sequence[int] = (), keys_from: int | None = None) -> TargetStates:
        """The states of a batch as drafters read them while decoding."""
        return tuned_pass(
            self.target, self.layers, batch.tokens_BT.to(self.target.device), taps=taps, keys_from=keys_from
        )

    def learn(self, batch: Batch) -> TargetStates:
        """The states of a batch as drafters read them in training: all that they may need."""
        return self(batch, taps=range(len(self.layers)), keys_from=0)

    def hidden(self, batch: Batch) -> Tensor:
        """The states after the last norm [B, T, D] alone."""
        return self(batch).hidden_BTD


class Drafting(Protocol):
    """The part of an objective of what drafts that tuning its target needs.

    run  runs the target: the frozen one, or the tuned one in its place
    """

    predictor: str
    predictors: int
    options: Any
    run: RunTarget

    def tuned_loss(self, batch: Batch, tuned: TargetStates, taught_BTD: Tensor | None, segment: Segment) -> Scores:
        """The loss of what drafts for a tuned target; ``taught_BTD`` are the original one's states, to distil from."""

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """As ``Objective.evaluate``."""


@dataclass(frozen=True)
class Alone:
    """Weights of the loss of a target that is tuned by itself: it has none."""


class TunedObjective:
    """The ``Objective`` of a target's terms, alone (LoRA) or together with what drafts for the tuned target.

        loss = each * main * CE(next token) + share * (the loss of what drafts)

    drafts  the objective of what drafts, which reads the tuned target's states; None: nothing does
    run     runs the tuned target
    each    predictions for a token of a completion, by which losses are divided
    soft    share of the original target's distribution in the loss of the next token, the rest being the completion's
            token; what drafts then distils from that distribution too, otherwise from the tuned target's own

    Predicted lengths are those of the tuned target's drafts on the completions of the data.
    """

    def __init__(
        self,
        target: Decoder,
        layers: nn.ModuleList,
        drafts: Drafting | None = None,
        *,
        run: TunedTarget | None = None,
        frozen: Decoder | None = None,
        each: float = 1.0,
        main: float = 1.0,
        share: float = 0.0,
        soft: float = 0.0,
    ) -> None:
        if drafts is None:
            check_weights(target)
        else:
            check_tunable(target)
        self.target, self.drafts, self.run = target, drafts, run or TunedTarget(target, layers)
        self.frozen, self.computed = frozen_target(target, frozen), (target if frozen is None else frozen).dtype
        self.each, self.main, self.share, self.soft = each, main, share, soft
        self.predictor, self.predictors, self.options = "token", 1, Alone()
        if drafts is not None:
            self.predictor, self.predictors, self.options = drafts.predictor, drafts.predictors, drafts.options
            drafts.run = self.run

    def freeze(self, batch: Batch) -> Tensor | None:
        """The original target's states after the last norm [B, T, D], if anything is distilled from them."""
        return self.frozen(batch).hidden_BTD if self.soft else None

    def keep(self, keeping: Keeping) -> None:
        """Keep the states of the original target."""
        self.frozen = keeping(self.frozen, dtype=self.computed)

    def segments(self, batch: Batch) -> Iterator[Segment]:
        """All positions with a next token at once: each needs the tuned pass over the whole text before it.

        The last has a next token to predict, and nothing for what drafts.
        """
        return segments(batch, size=batch.tokens_BT.shape[1], ahead=1, device=self.target.device)

    def predictions(self, batch: Batch) -> float:
        """The number of completion tokens, times the predictions of each."""
        return float((batch.lengths_B - 1 - batch.starts_B).sum()) * self.each

    def loss(self, batch: Batch, frozen: Tensor | None, segment: Segment) -> Scores:
        """The loss of a batch."""
        if self.drafts is None:
            loss, right_M = next_token_scores(self.target, batch, self.run.hidden(batch), segment)
            return Scores(loss, right_M.sum()[None].float(), torch.tensor([float(len(right_M))]))
        tuned = self.run.learn(batch)
        scores = self.drafts.tuned_loss(batch, tuned, frozen, segment)
        main, _ = next_token_scores(self.target, batch, tuned.hidden_BTD, segment, frozen, self.soft)
        return Scores(self.each * self.main * main + self.share * scores.loss, scores.right_S, scores.count_S)

    def evaluate(self, examples: Sequence[Example], *, nodes: Sequence[int] = ()) -> dict[str, Any]:
        """The evaluation of what drafts, and the tuned target's own quality under ``QUALITY``."""
        drafted = {} if self.drafts is None else self.drafts.evaluate(examples, nodes=nodes)
        return {**drafted, QUALITY: next_token_quality(self.target, self.run.hidden, examples)}

    def untuned(self, examples: Sequence[Example]) -> dict[str, float]:
        """The quality of the target without its terms."""
        return next_token_quality(self.target, lambda batch: self.frozen(batch).hidden_BTD, examples)


def next_token_scores(
    target: Decoder,
    batch: Batch,
    states_BTD: Tensor,
    segment: Segment,
    taught_BTD: Tensor | None = None,
    soft: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of a target's next token, summed over the positions of a segment, and which predictions are right [M].

    states_BTD  the target's states after the last norm
    taught_BTD  the original target's, to distil from; None: nothing is distilled
    soft        share of the original target's distribution in the loss; the rest is the completion's token
    """
    tokens_BT, (rows_M, at_M) = batch.tokens_BT.to(target.device), segment.places()
    words = Vocabulary.of(target, torch.arange(target.config.vocab_size, device=tokens_BT.device), tokens_BT)
    wanted_M, weight_M = words.place[tokens_BT[rows_M, at_M + 1]], torch.ones(len(at_M), device=tokens_BT.device)
    teacher_MD = None if taught_BTD is None or not soft else taught_BTD[rows_M, at_M]
    cap = target.config.logit_softcap
    return vocabulary_loss(words, states_BTD[rows_M, at_M], wanted_M, weight_M, teacher_MD, soft, cap)


@torch.no_grad()
def next_token_quality(
    target: Decoder, states: Callable[[Batch], Tensor], examples: Sequence[Example]
) -> dict[str, float]:
    """The loss a token, and the share of right tokens, of a target on completions; ``states`` runs it: [B, T, D]."""
    loss = right = count = 0.0
    for _, batch in grouped(examples):
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
    if target.config != target.config.dense():
        raise CapabilityError(
            f"{target.config.family} models cannot be tuned; use a decoder-only model without experts"
        )
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

    The terms are merged into the stored weights as loading them as a LoRA does, to the same bits.

    needs  the method whose adapter is part of the tuned model; empty: none
    """
    assert target.path is not None, "a target that is tuned was loaded from somewhere"
    checkpoint = read_checkpoint(target.path)
    described = {**_described(checkpoint, target), **({NEEDS: needs} if needs else {})}
    tensors: Mapping[str, Tensor] = checkpoint.tensors
    if target.lora is not None:
        tensors = with_lora(tensors, read_lora(target.lora, target.config), target.config)
    tensors = with_lora(tensors, lora_of(target.config, layers), target.config)
    cpu = torch.device("cpu")
    decoder, _ = fill_decoder(model_config(checkpoint.config), tensors, dtype=target.decoder.dtype, device=cpu)
    generation = target.path / "generation_config.json"
    if generation.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(generation, folder / generation.name)
    write_model(folder, decoder, described, target.tokenizer)
    return load_target(str(folder), dtype=target.decoder.dtype, device=str(target.decoder.device))


def write_model(
    folder: Path, decoder: Decoder, described: Mapping[str, Any], tokenizer: Any, dtype: torch.dtype | None = None
) -> None:
    """Write a decoder as a model folder; ``described`` is its config.json, which says that the folder is finished."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in sorted(decoder.named_parameters()):
        names = [alternatives[0] for alternatives in weight_source(decoder.config, name).tensors]
        whole = parameter.detach().to("cpu", dtype or parameter.dtype)
        parts = torch.split(whole, module_rows(decoder.config, len(names), len(whole)))
        tensors.update((each, part.clone()) for each, part in zip(names, parts, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    tokenizer.save_pretrained(folder)
    write_atomically(folder / "config.json", json.dumps(described, indent=2) + "\n")


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


def _described(checkpoint: Checkpoint, target: Target) -> dict[str, Any]:
    """config.json of the tuned target: what the target's own files say, and the type of the weights."""
    stored = str(target.decoder.dtype).removeprefix("torch.")
    return {
        **checkpoint.config,
        "torch_dtype": stored,
        "tie_word_embeddings": target.config.tied_head,
        "eos_token_id": list(target.config.eos_token_ids),
    }
