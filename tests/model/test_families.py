"""Models whose language model is a part of a larger one, and families that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import CASES, VOCABULARY, save_toy, tokens, toy_hf

from anabranch.errors import ModelError
from anabranch.model.families import FAMILIES, UNSUPPORTED, model_config
from anabranch.model.load import load_target
from small import logits_after

VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 28}}),
    "qwen3_5": ("qwen3_5", {"vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}}),
    "ministral3": ("mistral3", {"vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}}),
    "mistral": ("mistral3", {"vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}}),
}


def with_images(case: str) -> Any:
    """A model of images and text with random weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind, config = WHOLE[case]
    text_kind, text = CASES[case]
    described = AutoConfig.for_model(kind, **config, text_config={"model_type": text_kind, **text})
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(described, attn_implementation="eager").float().eval()


@pytest.mark.filterwarnings("ignore:the weights contain")
@pytest.mark.parametrize("case", WHOLE)
def test_the_text_part_of_a_model_of_images_and_text(tmp_path: Path, case: str) -> None:
    model = with_images(case)
    save_toy(model, tmp_path)
    target, ids = load_target(str(tmp_path), dtype="float32", device="cpu"), tokens(17)
    assert target.decoder.config.family == CASES[case][0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    assert expected.shape[-1] == VOCABULARY
    torch.testing.assert_close(logits_after(target.decoder, ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(kind for kind, _ in WHOLE.values()))
@pytest.mark.parametrize("part", [None, "llama", 3])
def test_a_missing_text_part_is_named(kind: str, part: Any) -> None:
    with pytest.raises(ModelError, match="text_config in the model's config must be an object"):
        model_config({"model_type": kind, "text_config": part})


@pytest.mark.parametrize("kind", sorted(UNSUPPORTED))
def test_families_that_people_ask_for_are_refused_with_a_reason(kind: str) -> None:
    assert kind not in FAMILIES
    with pytest.raises(ModelError, match=f"the family '{kind}' is not supported: (mixtures|layers|models) .*run"):
        model_config({"model_type": kind})


def test_a_granite_with_experts_or_recurrent_layers_is_refused_by_its_field(tmp_path: Path) -> None:
    kind, config = CASES["granitemoehybrid"]
    described = json.loads(toy_hf(kind, config).config.to_json_string())
    for field, value in {"num_local_experts": 8, "layer_types": ["mamba", "attention", "attention"]}.items():
        with pytest.raises(ModelError, match=field):
            model_config({**described, field: value})
    with pytest.raises(ModelError, match=r"without layer_types in config\.json have recurrent layers only"):
        model_config({key: value for key, value in described.items() if key != "layer_types"})
