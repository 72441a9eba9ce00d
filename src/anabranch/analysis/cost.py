"""The cost of a draft on top of the target's own pass: parameters, arithmetic, memory traffic (ACL figures 8 and 9).

All costs are counted from modules of the methods' shapes on the meta device (``drafting.counting``), for the draft
between two verifications. Registered methods count their own; other methods that the papers compare with are counted
below. docs/theory.md compares the counts with the papers' tables and lists the papers' unspecified details.

h width, v vocabulary, L context length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from anabranch.drafting.counting import (
    WEIGHT_BYTES,
    DraftCost,
    DraftShape,
    attention_operations,
    matrix_weights,
    parameters,
)
from anabranch.errors import InputError
from anabranch.methods import methods as registered
from anabranch.model.decoder import Decoder
from anabranch.model.families import model_config
from anabranch.model.weights import build_decoder

__all__ = ["MODELS", "cost", "costs", "target"]

Count = Callable[[Decoder, DraftShape], DraftCost]


def _model(family: str, h: int, layers: int, heads: int, inner: int, v: int, positions: int = 4096, **more: Any) -> Any:
    sizes = {"hidden_size": h, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": v}
    inner_size = {"ffn_dim" if family == "opt" else "intermediate_size": inner}
    return {"model_type": family, **sizes, **inner_size, "max_position_embeddings": positions, **more}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
# the fields of published configs that determine shapes
MODELS: dict[str, dict[str, Any]] = {
    "OPT-125m": _model("opt", 768, 12, 12, 3072, 50_272, 2048),
    "OPT-1.3b": _model("opt", 2048, 24, 32, 8192, 50_272, 2048),
    "OPT-6.7b": _model("opt", 4096, 32, 32, 16_384, 50_272, 2048),
    "Phi-1.3b": _model("phi", 2048, 24, 32, 8192, 51_200, 2048),
    "Phi-3": _model("phi3", 3072, 32, 32, 8192, 32_064),
    "SmolLM2-135M": _model("llama", 576, 30, 9, 1536, 49_152, 8192, num_key_value_heads=3, **_TIED),
    "Llama-68m": _model("llama", 768, 2, 12, 3072, 32_000),
    "Llama-2-7B": _model("llama", 4096, 32, 32, 11_008, 32_000),
    "Llama-2-13B": _model("llama", 5120, 40, 40, 13_824, 32_000),
    "Vicuna-33B": _model("llama", 6656, 60, 52, 17_920, 32_000),
    "Qwen2.5-0.5B": _model("qwen2", 896, 24, 14, 4864, 151_936, num_key_value_heads=2, **_TIED),
    "Qwen2.5-1.5B": _model("qwen2", 1536, 28, 12, 8960, 151_936, num_key_value_heads=2, **_TIED),
    "Mistral-7B": _model("mistral", 4096, 32, 32, 14_336, 32_000, num_key_value_heads=8),
}


def target(name: str) -> Decoder:
    """A target of ``MODELS`` on the meta device."""
    if name not in MODELS:
        raise InputError(f"there is no model {name!r} here; models are {', '.join(MODELS)}")
    return build_decoder(model_config(MODELS[name]))


def cost(method: str, name: str, shape: DraftShape | None = None) -> DraftCost:
    """The cost of a draft of ``method`` for the target ``name``. Raises InputError for an unknown name."""
    return costs(name, shape, methods=(method,))[method]


def costs(name: str, shape: DraftShape | None = None, *, methods: Iterable[str] | None = None) -> dict[str, DraftCost]:
    """The costs of several methods (None: all) for one target. Raises InputError for an unknown name."""
    shape, known = shape or DraftShape(), _counts()
    names = tuple(known if methods is None else methods)
    if unknown := [method for method in names if method not in known]:
        raise InputError(f"there is no method {unknown[0]!r} here; methods are {', '.join(known)}")
    decoder = target(name)
    with torch.device("meta"):
        return {method: known[method](decoder, shape) for method in names}


# -- the papers' methods ---------------------------------------------------------------------------------------------
def _draft_model(decoder: Decoder, s: DraftShape) -> DraftCost:
    """gamma sequential passes of a small decoder."""
    small = target(s.draft or ("OPT-125m" if decoder.config.family == "opt" else "Llama-68m"))
    read = matrix_weights(small)
    cache = 2 * small.config.num_layers * small.config.num_kv_heads * small.config.head_dim * s.context
    attention = small.config.num_layers * attention_operations(small.config, s.context)
    return DraftCost(parameters(small), s.gamma * WEIGHT_BYTES * (read + cache), s.gamma * (2 * read + attention))


def _lookahead(decoder: Decoder, s: DraftShape) -> DraftCost:
    """(W + G)(N - 1) more rows in the target's own pass; no parameters and no extra reads (Fu et al. 2024)."""
    rows = (s.window + s.guesses) * (s.ngram - 1)
    per_row = 2 * matrix_weights(decoder) + decoder.config.num_layers * attention_operations(decoder.config, s.context)
    return DraftCost(0, 0, rows * per_row)


def _counts() -> dict[str, Count]:
    counts: dict[str, Count] = {"draft model": _draft_model, "lookahead": _lookahead}
    for method in registered():
        counts |= method.counts
    return counts
