"""The configs of trained modules: values out of range are refused by name, and records give them back."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.errors import AdapterError, InputError
from anabranch.learning.recipe import Shape
from anabranch.methods.draft_model.recipes import DraftConfig
from anabranch.methods.eagle.recipes import EagleConfig
from anabranch.methods.hydra.recipes import HydraConfig
from anabranch.methods.lora import LoraConfig
from anabranch.methods.medusa.recipes import MedusaConfig
from anabranch.methods.space.recipes import MaskConfig
from anabranch.methods.streams.recipes import StreamConfig
from small import RICH

WRONG: dict[type[Shape], list[dict[str, Any]]] = {
    MedusaConfig: [{"num_heads": 0}, {"num_layers": 17}, {"head": "both"}, {"lora_rank": -1}],
    HydraConfig: [{"embeddings": "both"}, {"prefix": 1}, {"num_heads": 17}],
    EagleConfig: [{"bias": 1}],
    DraftConfig: [{"hidden_size": 0}, {"hidden_size": 128, "num_heads": 3}, {"num_layers": 1.5}],
    MaskConfig: [{"num_masks": value} for value in (0, 257, 1.5, True)],
    StreamConfig: [
        *({"num_streams": value} for value in (0, -1, 1.5, True)),
        *({name: -1} for name in ("attention_rank", "pruning_rank", "context_top")),
        *(
            {"num_stream_layers": 0},
            {"adapter_rank": 0},
            {"mlp_rank": 4},
            {"mlp_rank": -1, "stream_mlp": "mlp+adapter"},
        ),
        *({"stream_mlp": "mlp"}, {"position": "none"}, {"conditioning": "child"}, {"conditioning": "path"}),
        *({"conditioning_rank": 8}, {"mode": "joint"}),
    ],
}
KEPT: list[Shape] = [MedusaConfig(), HydraConfig(prefix=True), EagleConfig("1/2"), DraftConfig(), MaskConfig(2), RICH]


@pytest.mark.parametrize(
    ("kind", "wrong"), [pytest.param(kind, each, id=f"{each}") for kind, cases in WRONG.items() for each in cases]
)
def test_values_that_mean_nothing_are_refused_by_name(kind: type[Shape], wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        kind(**wrong)


@pytest.mark.parametrize("config", [*KEPT, LoraConfig()], ids=lambda config: type(config).__name__)
def test_a_record_gives_back_the_config(config: Shape) -> None:
    record = config.to_dict()
    assert type(config).from_dict(record) == config
    with pytest.raises(AdapterError, match="unknown field 'newer'"):
        type(config).from_dict({**record, "newer": 1})
    with pytest.raises(AdapterError, match="malformed"):
        type(config).from_dict({**record, next(iter(record)): None})
