"""EAGLE's heads as published by its authors (SafeAILab/EAGLE): one Llama layer, mostly without its first norm.

    fc.weight, fc.bias, layers.0.self_attn.q_proj.weight, ..., layers.0.post_attention_layernorm.weight, and a copy of
    the target's embedding, embed_tokens.weight

EAGLE-3's (``midlayer.*``) cannot be used: their layer reads embeddings and features side by side, at twice the width,
and has an output head of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.drafting.published import Layout, Published
from anabranch.errors import AdapterError, ModelError
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.model.decoder import Decoder
from anabranch.model.weights import assemble

__all__ = ["LAYOUTS"]

EMBEDDING = "embed_tokens.weight"


def _fits(names: Mapping[str, Tensor]) -> bool:
    return "fc.weight" in names and any(name.startswith("layers.0.") for name in names)


def _read(file: Published, target: Decoder) -> tuple[EagleConfig, dict[str, Tensor]]:
    _check_config(file, target)
    width = target.config.hidden_size
    norm, bias = "layers.0.input_layernorm.weight" in file, "fc.bias" in file
    config = EagleConfig(embedding_norm=False, input_norm=norm, bias=bias)
    weights = {"fc.weight": file.take("fc.weight", width, 2 * width)}
    if config.bias:
        weights["fc.bias"] = file.take("fc.bias", width)
    with torch.device("meta"):
        block = EagleModule(target.config, config).block
    one = replace(target.config, num_layers=1, sliding_layers=None)
    try:
        for name, parameter in block.named_parameters():
            weights[f"block.{name}"] = assemble(one, file, f"blocks.0.{name}", parameter.shape)
    except ModelError as error:
        raise AdapterError(f"{file.source} has no layer like this target's ({error})") from error
    if EMBEDDING in file:
        stored = file.take(EMBEDDING, target.config.vocab_size, width)
        own = target.embedding(torch.arange(len(stored), device=target.device)).to("cpu", torch.float32)
        if not torch.allclose(stored.float(), own, rtol=0.02, atol=1e-3):
            raise AdapterError(
                f"{file.source} was trained with other embeddings than this target's; give the target that it was "
                "trained for"
            )
    return config, weights


def _check_config(file: Published, target: Decoder) -> None:
    """Raise AdapterError where the head's config.json describes another layer than the target's."""
    model = target.config
    ours = {
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "rope_theta": model.rope.theta,
        "rms_norm_eps": model.norm_eps,
    }
    if file.config.get("num_hidden_layers", 1) != 1:
        raise AdapterError(f"{file.source} has {file.config['num_hidden_layers']} layers; only heads of one are read")
    for name, value in ours.items():
        theirs = file.config.get(name)
        if theirs is not None and theirs != value:
            raise AdapterError(
                f"{file.source} has {name} {theirs} in its config.json, and this target has {value}; give the target "
                "that it was trained for"
            )


def _refuse(file: Published, target: Decoder) -> tuple[EagleConfig, dict[str, Tensor]]:
    raise AdapterError(
        f"{file.source} is an EAGLE-3 head, whose layer has another form than this library's; train one with several "
        "feature taps, see 'anabranch train eagle --help'"
    )


LAYOUTS = (
    Layout("EAGLE", _fits, _read),
    Layout("EAGLE-3", lambda names: any(name.startswith("midlayer.") for name in names), _refuse),
)
