"""Checkpoints that store the experts of a layer in one tensor, read as if each expert had tensors of its own.

    mlp.experts.gate_up_proj  [E, 2 I, D]   gate, then up, of transformers' modules
                              [E, D, 2 I]   gate and up alternate: gpt-oss
    mlp.experts.down_proj     [E, D, I], of gpt-oss [E, I, D]

An expert's weights are views of the stored tensor. E experts, I channels inside an expert, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from anabranch.errors import ModelError
from anabranch.model.config import ModelConfig
from anabranch.model.families import FAMILIES
from anabranch.model.stored import LazyTensors

__all__ = ["split_experts"]

_FUSED = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)(_bias)?")


def split_experts(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors under the names that ``weight_source`` gives; the same object if no experts are stored together."""
    experts = config.experts
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
