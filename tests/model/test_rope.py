from __future__ import annotations

from typing import Any

import pytest
import torch
from test_parity import advance, close
from toys import CASES, Oracle, tokens, toy_hf

from anabranch.errors import ModelError
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.rope import ROPE_VARIANTS, UNLIMITED, Rope, rope_frequencies, rotate
from anabranch.model.weights import fill_decoder
from small import new_cache

# longest 64 and half of it, so that a toy sequence lies beyond the length that the model was first trained with
_LONG = {"max_position_embeddings": 64}
_LLAMA = {**CASES["llama"][1], **_LONG}
_FACTORS = [1.0 + 0.2 * i for i in range(8)]
_ORIGINAL = {"original_max_position_embeddings": 32}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MSCALE = {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}


def scaled(kind: str, family: str = "llama", **fields: Any) -> tuple[str, dict[str, Any]]:
    """A family, and a config of it with a variant of rotations."""
    return family, {**_LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


_LONGROPE = scaled("longrope", short_factor=_FACTORS, long_factor=[2 * factor for factor in _FACTORS])[1]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": scaled("default", rope_theta=5e5),
    "linear": scaled("linear", factor=4.0),
    "dynamic": ("llama", {**scaled("dynamic", factor=3.0)[1], "max_position_embeddings": 32}),
    "llama3": scaled("llama3", **_LLAMA3, **_ORIGINAL),
    "yarn": scaled("yarn", "qwen2", factor=4.0, **_ORIGINAL),
    "yarn-mscale": scaled("yarn", factor=4.0, **_MSCALE, **_ORIGINAL),
    "longrope": ("phi3", {**_LONGROPE, **_ORIGINAL}),
}


def described(variant: str) -> tuple[ModelConfig, Any]:
    """Our config, by way of the file that transformers would write, and transformers' own."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(VARIANTS[variant][0], **VARIANTS[variant][1])
    return model_config(theirs.to_dict()), theirs


def test_every_variant_is_tested() -> None:
    assert {variant.split("-")[0] for variant in VARIANTS} == set(ROPE_VARIANTS)


@pytest.mark.parametrize("length", [20, 48, 64, 90])
@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"default"}))
def test_frequencies_equal_those_of_transformers(variant: str, length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = described(variant)
    kind = theirs.rope_parameters["rope_type"]
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=length)
    frequencies, factor = rope_frequencies(ours.rope, torch.tensor([7, length, 80]))
    assert len(frequencies) == (3 if kind in ("dynamic", "longrope") else 1)
    torch.testing.assert_close(frequencies[min(1, len(frequencies) - 1)], expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("length", [20, 60])
def test_logits_within_and_beyond_the_original_length(variant: str, length: int) -> None:
    model = toy_hf(*VARIANTS[variant])
    config = model_config(model.config.to_dict())
    decoder, _ = fill_decoder(config, model.state_dict(), dtype=torch.float32, device=torch.device("cpu"))
    ids = tokens(length)
    expected = Oracle(model).logits(ids)
    close(_logits(decoder, [ids]), expected)
    # stepping does not change the rotation of a prompt
    close(_logits(decoder, [ids[:7], ids[7:19], ids[19:]]), expected)


def _logits(decoder: Decoder, pieces: list[list[int]]) -> torch.Tensor:
    cache = new_cache(decoder, prompt=sum(len(piece) for piece in pieces))
    return torch.cat([advance(decoder, piece, cache) for piece in pieces])


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 7e4, "rope_scaling": None},
        {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 7e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_files_from_before_transformers_5(old: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = {"model_type": "llama", **_LLAMA, **old}
    theirs = AutoConfig.for_model(**{**config, "rope_scaling": dict(old["rope_scaling"] or {}) or None})
    assert model_config(config).rope == model_config(theirs.to_dict()).rope
    assert model_config(config).rope.theta == 7e4


def test_first_phi3_files_say_su() -> None:
    config = {**VARIANTS["longrope"][1], "model_type": "phi3"}
    factors = {"short_factor": _FACTORS, "long_factor": _FACTORS, "type": "su"}
    rope = model_config({**config, "rope_parameters": None, "rope_scaling": factors}).rope
    assert rope.scaling["rope_type"] == "longrope"
    assert rope.original_max_positions == 32


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral', which is not supported; supported are default, dynamic, linear"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs 'low_freq_factor'"),
        ({"rope_type": "linear"}, "'linear' needs 'factor'"),
        ({"rope_type": "linear", "factor": "two"}, "factor .* must be a number"),
        (
            {"rope_type": "longrope", "factor": 2.0, "short_factor": _FACTORS, "long_factor": [1.0]},
            r"cannot be computed \(1 factors for 8",
        ),
    ],
)
def test_an_unknown_or_incomplete_record_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_config({"model_type": "llama", **_LLAMA, "rope_parameters": {**_ORIGINAL, **record}})


def test_tables_are_computed_once_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = Rope(RopeConfig(dim=8), torch.device("cpu"))
    made: list[int] = []
    table = rope._table
    monkeypatch.setattr(rope, "_table", lambda key, rows: made.append(rows) or table(key, rows))
    positions = torch.tensor([[0, 3, 1100]])
    cos, sin = rope(positions, 100)
    for longest in (100, 50, 120):
        assert torch.equal(rope(positions, longest)[0], cos)
    # 100 + 1024 rounded up to 2048: 1500 positions need a longer one, and the old positions keep their numbers
    longer, _ = rope(positions, 1500)
    assert torch.equal(longer, cos)
    assert made == [2048, 3072]
    assert cos.shape == sin.shape == (1, 3, 8)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(1, 3, 8))


def test_length_dependent_variants_keep_few_tables() -> None:
    rope = Rope(described("dynamic")[0].rope, torch.device("cpu"))
    positions = torch.arange(40)[None]
    short = rope(positions, 64, [20])[0]
    assert torch.equal(rope(positions, 64, [32])[0], short), "up to the trained length nothing is stretched"
    for prompt in range(41, 60):
        assert not torch.equal(rope(positions, 64, [prompt])[0], short)
    assert len(rope._tables) <= 4


def test_rows_have_the_rotations_of_their_own_prompts() -> None:
    for variant in ("dynamic", "longrope", "yarn"):
        rope = Rope(described(variant)[0].rope, torch.device("cpu"))
        positions = torch.arange(50).expand(3, 50)
        together = rope(positions, 64, [20, 40, 0])
        for row, prompt in enumerate((20, 40, 0)):
            for both, one in zip(together, rope(positions[:1], 64, [prompt]), strict=True):
                assert torch.equal(both[row], one[0])
        # a token after the prompt is rotated for its own position
        assert torch.equal(together[0][1, 40:], together[0][2, 40:])
        assert torch.equal(together[0][1, 5], together[0][2, 5]) == (variant == "yarn")


@pytest.mark.parametrize(
    ("stated", "longest"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, UNLIMITED),
        ({"rope_type": "llama3", **_LLAMA3, "original_max_position_embeddings": 8}, 64),
    ],
)
def test_the_context_is_that_of_the_scaled_model(stated: dict[str, Any], longest: int) -> None:
    assert model_config({"model_type": "llama", **_LLAMA, "rope_parameters": stated}).max_positions == longest


def test_rotation_as_drawn() -> None:
    """One head of 6 channels of which 4 turn, by 90 degrees: (1 2 | 3 4) -> (-3 -4 | 1 2), 5 6 stay."""
    x = torch.arange(1.0, 7.0).view(1, 1, 1, 6)
    quarter = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)
    assert rotate(x, *quarter).flatten().tolist() == [-3, -4, 1, 2, 5, 6]
