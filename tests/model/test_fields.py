"""The tables of config fields against transformers: every field is classified, every default is theirs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pairs import PAIRS
from toys import CASES

from anabranch.errors import ModelError
from anabranch.model.families import FAMILIES, model_config
from anabranch.model.fields import FIELDS

# attributes of a config that are no fields of its file: methods, properties and constants of its class
NOT_FIELDS = {
    *("get_text_config", "standardize_rope_params", "validate_rope"),
    *("number_of_conv_states",),  # of layers with convolutions alone
}
# honoured fields that the classes do not declare
UNDECLARED = {
    *("rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "layer_types"),
    *("rotary_emb_base", "rotary_pct", "head_dim", "rope_local_base_freq", "sliding_window_pattern"),
    *("full_attention_interval",),
    *("decoder_start_token_id", "scale_decoder_outputs", "bos_token_id", "tie_word_embeddings"),  # of T5
}
# families of encoder-decoder models
WITH_SOURCE = {family for family, table in FIELDS.items() if "decoder_start_token_id" in table.honoured}
MODULES = {"gemma3_text": "gemma3", "qwen3_5_text": "qwen3_5"}  # where the names of family and module differ
ROTARY = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}


@cache
def config_class(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def tree(module: str) -> ast.Module:
    """The source of a module of transformers."""
    spec = importlib.util.find_spec(f"transformers.{module}")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def reads(module: str) -> set[str]:
    """The fields of a config that a module reads: ``config.X`` and ``getattr(config, "X")``."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            of, name = node.args[:2]
            if _is_config(of) and isinstance(name, ast.Constant):
                found.add(name.value)
    return found


def takes(module: str) -> set[str]:
    """Fields that a module's config classes accept besides those that they declare: ``kwargs.pop("X")`` and such."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs")), args=[ast.Constant(value=name), *_]):
                found.add(str(name))
            case ast.Compare(left=ast.Constant(value=name), comparators=[ast.Name(id="kwargs")]):
                found.add(str(name))
    return found


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


def known(family: str) -> set[str]:
    table = FIELDS[family]
    return {*table.honoured, *table.refused, *table.ignored, *table.aliases, *NOT_FIELDS}


QUICK = ("llama", "qwen3", "gemma3_text", "gpt_oss", "gpt2")  # the others are compared in the thorough run


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_each_field_that_transformers_has_or_reads_is_classified(family: str) -> None:
    """A failure after an update of transformers names new fields: honour them, refuse them, or list them as ignored."""
    declared = {field.name for field in dataclasses.fields(config_class(family))}
    module = MODULES.get(family, family)
    modeling = reads(f"models.{module}.modeling_{module}") | takes(f"models.{module}.configuration_{module}")
    everywhere = reads("masking_utils") | reads("cache_utils")
    rope = "modeling_rope_utils"
    rotary = reads(rope) | takes(rope) if "rope_parameters" in declared else set()
    if family == "gemma3_text":  # whose module has the models of images too
        images = ("image_size", "image_token_id", "mm_tokens_per_image", "patch_size", "layer_norm_eps")
        modeling -= {*images, "text_config", "vision_config"}
    if family == "qwen3_5_text":
        images = ("image_token_id", "video_token_id", "spatial_merge_size", "text_config", "vision_config")
        modeling -= {*images, "depth", "num_heads", "in_channels", "patch_size", "temporal_patch_size"}
        modeling -= {"num_position_embeddings", "out_hidden_size"}
    if family == "gpt_neox":  # which has names of its own for these
        rotary -= {"rope_theta", "partial_rotary_factor"}
    sizes = {"d_model"} if family in WITH_SOURCE else {"hidden_size", "num_hidden_layers"}
    assert sizes <= modeling | declared, "the reads are found"
    assert {"sliding_window", "is_causal", "layer_types"} <= everywhere
    assert sorted((declared | modeling | everywhere | rotary) - known(family)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_is_classified_twice(family: str) -> None:
    table = FIELDS[family]
    groups = [set(table.honoured), set(table.refused), set(table.ignored), set(table.aliases)]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert table.nullable <= set(table.honoured)
    assert set(table.aliases.values()) <= set(table.honoured)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    kind, table = config_class(family), FIELDS[family]
    own = {field.name: field.default for field in dataclasses.fields(kind)}
    others = {name: alias for name, alias in kind.attribute_map.items() if name not in table.refused}
    assert others == {name: alias for alias, name in table.aliases.items()}
    declared = {name: own.get(alias, own.get(name)) for alias, name in table.aliases.items()}
    declared |= {name: own[name] for name in table.honoured if name in own}
    assert {name: table.honoured[name] for name in declared} == declared
    if "rope_parameters" in own and family != "ministral3":  # whose rope_parameters have a default of their own
        rotary = kind().rope_parameters
        rotary = rotary.get("full_attention", rotary)
        theta, share = ROTARY.get(family, ("rope_theta", "partial_rotary_factor"))
        assert table.honoured[theta] == rotary["rope_theta"]
        assert table.honoured[share] == rotary.get("partial_rotary_factor")
    assert set(table.honoured) - set(declared) <= UNDECLARED


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"ministral", "granitemoehybrid"}))
def test_an_empty_config_is_that_of_the_class(family: str) -> None:
    """Sizes and all; Ministral's class needs head_dim, and Granite 4's describes a mixture of experts."""
    ours = model_config({"model_type": family})
    assert ours == model_config({**config_class(family)().to_dict()})
    assert ours.num_layers == config_class(family)().num_hidden_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_refused_fields_are_named(family: str) -> None:
    cases = {**CASES, **PAIRS}
    base = {
        "model_type": family,
        **cases.get(family, cases["qwen3_5" if family == "qwen3_5_text" else "mistral-sliding"])[1],
    }
    for name, (neutral, _) in FIELDS[family].refused.items():
        for value in neutral:
            assert model_config({**base, name: value}) == model_config(base)
        with pytest.raises(ModelError, match=f"{family} models with {name} '!' in config.json are not supported: "):
            model_config({**base, name: "!"})


def test_fields_of_other_families_are_ignored_even_if_malformed() -> None:
    base = {"model_type": "gpt2", **CASES["gpt2"][1]}
    others = {name for table in FIELDS.values() for name in table.honoured} - known("gpt2")
    assert {"head_dim", "num_key_value_heads", "rope_theta", "query_pre_attn_scalar"} <= others
    for name in others:
        for value in (0, -1, "x", None, [1], 3.5, True):
            assert model_config({**base, name: value}) == model_config(base)


PAGE = Path(__file__).parents[2] / "docs" / "installation.md"


def test_the_page_lists_the_families() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [family for family in FIELDS if f"`{family}`" not in page] == []
