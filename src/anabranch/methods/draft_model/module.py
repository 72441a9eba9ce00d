"""A draft model that is trained for one target: a small Llama with the target's vocabulary and one table for both ends.

V vocabulary of the target, D width of the draft model.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.drafting.trained import TrainedModule, check_shape
from anabranch.errors import InputError
from anabranch.learning.recompute import through
from anabranch.methods.draft_model.recipes import DraftConfig
from anabranch.methods.tuning import write_model
from anabranch.model.backends import backend_for
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.model.pack import pack_decoder

__all__ = ["DraftConfig", "DraftModule", "begin_with", "decoder_of", "export", "start_from_target"]

STD = 0.02  # of fresh weights
TABLE = 0.1  # root mean square of a table that begins with the target's


class TiedHead(nn.Module):
    """The head whose weight is the embedding's. It has no parameter of its own, so the table is stored once."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list: no part of this module
        self.bias = None

    @property
    def weight(self) -> Tensor:
        """[V, D]."""
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return F.linear(x, self.weight)


class DraftModule(TrainedModule):
    """The trained module of ``draft_model``; ``model`` is the decoder."""

    def __init__(self, target: ModelConfig, config: DraftConfig, vocabulary: Tensor | None = None) -> None:
        super().__init__()
        if vocabulary is not None and len(vocabulary) != target.vocab_size:
            raise InputError(
                f"a draft model drafts from the whole vocabulary of {target.vocab_size:,} tokens, got "
                f"{len(vocabulary):,} of them"
            )
        self.config = config
        self.register_buffer("vocabulary", torch.arange(target.vocab_size))
        self.model = Decoder(config.model(target))
        self.model.head = TiedHead(self.model.embedding)
        for parameter in self.model.parameters():
            if parameter.dim() == 2 and not parameter.is_meta:
                nn.init.normal_(parameter, std=STD)

    def states(self, tokens_BT: Tensor) -> Tensor:
        """States after the last norm [B, T, D] of whole texts, with gradients."""
        model, (rows, length) = self.model, tokens_BT.shape
        positions = torch.arange(length, device=tokens_BT.device).expand(rows, length)
        # copies: tables that a replay made in inference mode take no part in gradients
        cos, sin = (turn.clone().to(model.dtype) for turn in model.rope()(positions, length))
        x = model.embed(tokens_BT, positions)
        for block in model.blocks:
            x = through(partial(block, cos=cos, sin=sin, attend=_causal), x)
        return model.normed(x)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [B, T, H, E] -> [B, T, H E]."""
    seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return seen.transpose(1, 2).flatten(2)


@torch.no_grad()
def start_from_target(target: Decoder, module: DraftModule) -> None:
    """Begin with the principal components of the target's head as the table.

    Tokens that the target takes for alike are so from the start, also those that no completion has.
    """
    table = module.model.embedding.weight
    head = target.head.weight.detach().float()
    if table.shape[1] > head.shape[1]:
        return
    centred = head - head.mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    projected = centred @ directions[:, -table.shape[1] :]
    table.copy_(TABLE * projected / projected.pow(2).mean().sqrt().clamp(min=1e-12))


def begin_with(module: DraftModule, trained: DraftModule) -> None:
    """Copy the weights of a trained draft model of the same shape. Raises InputError."""
    check_shape(module.config.to_dict(), trained.config.to_dict())
    module.load_state_dict(trained.state_dict())


_packed: WeakKeyDictionary[DraftModule, Decoder] = WeakKeyDictionary()


def decoder_of(module: DraftModule, target: Decoder) -> Decoder:
    """The module's decoder, packed where the target is; all drafters of the module share that copy."""
    if target.backend.kernels is None:
        if target.backend.capture is not None and module.model.backend.capture is None:
            module.model.backend = backend_for(target.device)
        return module.model
    if module not in _packed:
        _packed[module] = copy.deepcopy(module.model)
        pack_decoder(_packed[module])
    return _packed[module]


def export(folder: Path, module: DraftModule, target: Target) -> None:
    """Write the draft model as a folder that ``anabranch.load`` and ``draft_model:model=`` read."""
    config = module.model.config
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "torch_dtype": "bfloat16",
    }
    write_model(folder, module.model, described, target.tokenizer, torch.bfloat16)
