"""Checkpoints that store parameters in another form: experts of a layer or queries and gates in one tensor.

Files of encoder-decoder models lack biases that are zero.

    mlp.experts.gate_up_proj  [E, 2 I, D]   gate, then up, of transformers' modules
                              [E, D, 2 I]   gate and up alternate: gpt-oss
    mlp.experts.down_proj     [E, D, I], of gpt-oss [E, I, D]
    self_attn.q_proj          [2 H, D]      queries and gates by turns, head by head: Qwen3.5

The parts are views of the stored tensor. E experts, I channels inside an expert, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from anabranch.errors import ModelError
from anabranch.model.config import ModelConfig
from anabranch.model.families import FAMILIES
from anabranch.model.stored import LazyTensors

__all__ = ["split_fused"]

UNREAD = ".EncDecAttention.relative_attention_bias.weight"  # of old files of T5
_GATED = re.compile(r"(.*\.self_attn\.q_proj)\.(weight|bias)")
_FUSED = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)(_bias)?")


def split_fused(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors under the names that ``weight_source`` gives; the same object if nothing has to be separated."""
    experts = config.experts
    if config.encoder is not None:
        return _completed(config, tensors)
    if config.attention_gate:
        return _split_gates(config, tensors)
    if experts is None or not any(_FUSED.fullmatch(name) for name in tensors):
        return tensors
    block = FAMILIES[config.family].block
    alternate = config.family == "gpt_oss"
    loaders: dict[str, Callable[[], Tensor]] = {}
    for name in tensors:
        if (match := _FUSED.fullmatch(name)) is None:
            # transformers' module of Mixtral has another name for the router than its files
            stored = name.replace(".mlp.gate.", f".{block['mlp.router'][0]}.")
            loaders[stored] = partial(tensors.__getitem__, name)
            continue
        prefix, what, bias = match.groups()
        ours = block["mlp.experts.down" if what == "down_proj" else "mlp.experts.up"]
        for expert in range(experts.count):
            for part, module in enumerate(ours):
                kind = "weight" if bias is None else "bias"
                load = partial(_part, tensors, name, expert, part, len(ours), alternate, experts.count)
                loaders[f"{prefix}{module.format(expert)}.{kind}"] = load
    return LazyTensors(loaders)


def _completed(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of an encoder-decoder model: the bias of the head as a vector, zeros for biases that it lacks.

    Tables that are computed or that nobody reads are left out.
    """
    computed = ".embed_positions.weight" if config.position == "sinusoidal" else UNREAD
    loaders: dict[str, Callable[[], Tensor]] = {
        name: partial(tensors.__getitem__, name) for name in tensors if not name.endswith((computed, UNREAD))
    }
    if config.qkv_bias:  # Whisper's keys have none
        keys = [name for name in loaders if name.endswith("_attn.k_proj.weight")]
        for name in keys:
            loaders.setdefault(name.removesuffix("weight") + "bias", partial(_zeros, tensors, name))
    if config.head_bias:
        bias = FAMILIES[config.family].head_bias
        stored = loaders.get(bias)
        loaders[bias] = (lambda: torch.zeros(config.vocab_size)) if stored is None else (lambda: stored().flatten())
    return LazyTensors(loaders)


def _zeros(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A bias of zeros for the outputs of a matrix."""
    return torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)


def _split_gates(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Queries and gates, whose rows alternate head by head in ``q_proj``."""
    loaders: dict[str, Callable[[], Tensor]] = {}
    for name in tensors:
        if (match := _GATED.fullmatch(name)) is None:
            loaders[name] = partial(tensors.__getitem__, name)
            continue
        for part, what in enumerate(("queries", "gate")):
            loaders[f"{match[1]}.{what}.{match[2]}"] = partial(_by_turns, tensors, name, part, config)
    return LazyTensors(loaders)


def _by_turns(tensors: Mapping[str, Tensor], name: str, part: int, config: ModelConfig) -> Tensor:
    whole, rows = tensors[name], 2 * config.num_heads * config.head_dim
    if len(whole) != rows:
        raise ModelError(
            f"{name} has the shape {tuple(whole.shape)}, but the config requires {rows} rows; config.json and weights "
            "do not belong together"
        )
    return whole.view(config.num_heads, 2, config.head_dim, *whole.shape[1:])[:, part].flatten(0, 1)


def _part(
    tensors: Mapping[str, Tensor], name: str, expert: int, part: int, parts: int, alternate: bool, count: int
) -> Tensor:
    """One matrix [out, in] or bias [out] of an expert."""
    whole = tensors[name]
    if len(whole) != count or whole.dim() != (2 if name.endswith("_bias") else 3):
        raise ModelError(
            f"{name} has the shape {tuple(whole.shape)}, but the config requires {count} experts; config.json and "
            "weights do not belong together"
        )
    of_expert = whole[expert]
    if not alternate:
        return of_expert.chunk(parts)[part]
    return (of_expert.t() if of_expert.dim() == 2 else of_expert)[part::parts]
