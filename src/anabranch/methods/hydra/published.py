"""Hydra's heads as published by their authors (zankner/Hydra), with and without a prefix layer.

    hydra_mlp.0.0.linear.weight, hydra_mlp.0.0.res_connection.weight, ..., hydra_lm_head.0.weight, hydra_lm_head.0.bias
    hydra_mlp.0.1.linear.weight, ..., hydra_lm_head.0.1.weight, ..., prefix_embeding_layer.layers.0.*, .norm.weight

The second form has dropout layers in between, so blocks have odd numbers; "embeding" is the authors' spelling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.drafting.published import Layout, Published
from anabranch.errors import AdapterError, ModelError
from anabranch.methods.hydra.module import HydraConfig, HydraModule
from anabranch.model.decoder import Decoder
from anabranch.model.weights import assemble

__all__ = ["LAYOUTS"]

PREFIX = "prefix_embeding_layer."


def _fits(names: Mapping[str, Tensor]) -> bool:
    return any(re.fullmatch(r"hydra_mlp\.0\.\d+\.linear\.weight", name) for name in names)


def _read(file: Published, target: Decoder) -> tuple[HydraConfig, dict[str, Tensor]]:
    if file.config.get("hidden_state_offset"):
        raise AdapterError(f"{file.source} reads states before the target's last layer, which is not supported")
    heads = file.numbers(r"hydra_mlp\.(\d+)\.\d+\.linear\.weight")
    blocks = _blocks(file)
    prefix = any(name.startswith(PREFIX) for name in file)
    config = HydraConfig(
        num_heads=heads, num_layers=len(blocks), head="own", embeddings="raw", prefix=prefix, published=True
    )
    width, words = target.config.hidden_size, target.config.vocab_size
    weights: dict[str, Tensor] = {}
    for head in range(heads):
        for place, number in enumerate(blocks):
            name, ours = f"hydra_mlp.{head}.{number}", f"blocks.{head}.{place}"
            inputs = width if place else (head + 2) * width
            weights[f"{ours}.weight"] = file.take(f"{name}.linear.weight", width, inputs)
            weights[f"{ours}.bias"] = file.take(f"{name}.linear.bias", width)
            if not place:
                weights[f"{ours}.residual"] = file.take(f"{name}.res_connection.weight", width, inputs)
                weights[f"{ours}.residual_bias"] = file.take(f"{name}.res_connection.bias", width)
        output = f"hydra_lm_head.{head}.1" if f"hydra_lm_head.{head}.1.weight" in file else f"hydra_lm_head.{head}"
        weights[f"weights.{head}"] = file.take(f"{output}.weight", words, width)
        weights[f"biases.{head}"] = file.take(f"{output}.bias", words)
    if prefix:
        weights |= _prefix(file, target, config)
    return config, weights


def _blocks(file: Published) -> list[int]:
    """The numbers of each head's blocks: 0, 1, ..., or 1, 3, ... with dropout layers in between."""
    matches = (re.fullmatch(r"hydra_mlp\.0\.(\d+)\.linear\.weight", name) for name in file)
    return sorted(int(match[1]) for match in matches if match is not None)


def _prefix(file: Published, target: Decoder, config: HydraConfig) -> dict[str, Tensor]:
    """The weights of the prefix layer, which is wired as the target's layers, and of the norm after it."""
    width, words = target.config.hidden_size, target.config.vocab_size
    embedding, layer = f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0."
    if embedding in file:
        file.take(embedding, words, width)  # of no use: the layer reads states
    with torch.device("meta"):
        block = HydraModule(target.config, config).layer
    assert block is not None
    tensors = {name.removeprefix(PREFIX): file[name] for name in file if name.startswith(layer)}
    one = replace(target.config, num_layers=1, sliding_layers=None)
    try:
        weights = {
            f"layer.{name}": assemble(one, tensors, f"blocks.0.{name}", parameter.shape)
            for name, parameter in block.named_parameters()
        }
    except ModelError as error:
        raise AdapterError(f"{file.source} has no prefix layer like this target's ({error})") from error
    return weights | {"norm.weight": file.take(f"{PREFIX}norm.weight", width)}


LAYOUTS = (Layout("Hydra", _fits, _read),)
