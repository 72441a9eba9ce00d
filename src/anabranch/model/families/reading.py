"""Read a config, and the sources of parameters, of any family."""

from __future__ import annotations

import re
from dataclasses import replace

from anabranch.errors import ModelError
from anabranch.model.check import check_config, check_fields, token_ids
from anabranch.model.config import ModelConfig
from anabranch.model.families.table import FAMILIES, UNSUPPORTED, Family, HfConfig, Layout, Source
from anabranch.model.fields import FIELDS, family_of, read_fields, text_part
from anabranch.model.rope import context_length
from anabranch.support.jsonfiles import shown

__all__ = ["model_config", "module_rows", "weight_source"]

ENCODER = "encoder."  # before the names of the encoder's parameters
_EXPERT = re.compile(r"mlp\.experts\.(\d+)")


def model_config(hf: HfConfig, *, family: str | None = None) -> ModelConfig:
    """The ModelConfig of a Hugging Face config. Raises ModelError for an unsupported family or option.

    family  the family; None: the one as which transformers would load the file
    """
    hf = text_part(hf)
    if hf.get("quantization_config"):
        raise ModelError("the weights are stored quantised; use unquantised safetensors or a GGUF file instead")
    name = family_of(hf) if family is None else family
    if name not in FAMILIES:
        why = f": {UNSUPPORTED[name]}" if name in UNSUPPORTED else ""
        raise ModelError(f"the family {shown(name)} is not supported{why}; supported are {', '.join(sorted(FAMILIES))}")
    fields, given = read_fields(hf, name)
    check_fields(given, FIELDS[name].nullable)
    words = fields["vocab_size"]
    if "eos_token_id" not in given and fields["eos_token_id"] not in range(words):
        fields["eos_token_id"] = None  # the family's usual end token, in a smaller vocabulary
    fields["eos_token_id"] = token_ids(fields["eos_token_id"], "eos_token_id", words)
    config = FAMILIES[name].describe({**fields, "family": name})
    if config.position == "rope":
        config = replace(config, max_positions=context_length(config.rope))
    check_config(config)
    return config


def weight_source(config: ModelConfig, parameter: str) -> Source:
    """The source of a parameter of our decoder, given its name in ``named_parameters``."""
    family, encoder = FAMILIES[config.family], config.encoder
    if encoder is not None and family.encoder is not None and parameter.startswith(ENCODER):
        return _source(encoder.layers, family.encoder, parameter.removeprefix(ENCODER))
    return _source(config, family, parameter)


def _source(config: ModelConfig, family: Family, parameter: str) -> Source:
    stem, _, kind = parameter.rpartition(".")
    if kind not in ("weight", "bias"):  # a tensor of its own
        stem, kind = parameter, ""
    suffix = f".{kind}" if kind else ""
    outer = family.prefixes[0].partition(".")[0] + "."
    heads = tuple(f"{prefix}{head}.{kind}" for prefix in ("", outer) for head in family.heads)
    if stem == "head":
        return Source(((family.head_bias,) if kind == "bias" and family.head_bias else heads,))
    layout: Layout = "rows"
    if stem.startswith("blocks."):
        _, index, part = stem.split(".", 2)
        expert = _EXPERT.match(part)
        part, number = (part, "") if expert is None else (f"mlp.experts{part[expert.end() :]}", expert[1])
        plain = part == "mlp.up" and not config.gated_mlp and family.ungated
        named = family.ungated if plain else family.block[part]
        modules = tuple(f"{family.layers}.{index}.{module.format(number)}" for module in named)
        layout = family.layouts.get(part, "rows")
    else:
        modules = (getattr(family, stem, stem),)
    prefixes = (*family.prefixes, outer + family.prefixes[0])
    shared = family.tables if config.encoder is not None and config.encoder.shared else ()
    tied = (*shared, *(heads if config.tied_head else ())) if stem == "embedding" else ()
    return Source(tuple((*(f"{p}{module}{suffix}" for p in prefixes), *tied) for module in modules), layout)


def module_rows(config: ModelConfig, count: int, rows: int) -> list[int]:
    """The rows of each of ``count`` modules that are fused into a layer of ``rows``: q, k and v, or gate and up."""
    if count == 3:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return [q, kv, kv]
    return [rows // count] * count
