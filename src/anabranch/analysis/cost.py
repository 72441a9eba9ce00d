"""What a draft costs beside the target's own pass: parameters, arithmetic, memory traffic (ACL figures 8 and 9).

Everything is counted from modules of the methods' shapes on the meta device, so nothing is allocated. One *draft* is
what a method proposes between two verifications. Arithmetic is 2 operations a weight and row; attention is
4 operations a channel, query and key. Norms, embeddings and softmax are left out. docs/theory.md compares the counts
with the papers' tables and says what the papers leave open.

h width, v vocabulary, L context length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from anabranch.errors import InputError
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.config import StreamConfig
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Block, Decoder
from anabranch.model.families import model_config
from anabranch.model.weights import build_decoder

__all__ = ["METHODS", "MODELS", "Cost", "Setting", "cost", "costs", "parameters", "target"]

WEIGHT_BYTES = 2  # 16 bits, as in the papers' measurements


def _llama(h: int, layers: int, heads: int, inner: int, v: int = 32_000, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": v,
        "max_position_embeddings": 4096,
        **more,
    }


def _opt(h: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * h,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
    }


# the published configs, as far as shapes follow from them
MODELS: dict[str, dict[str, Any]] = {
    "OPT-125m": _opt(768, 12, 12),
    "OPT-1.3b": _opt(2048, 24, 32),
    "OPT-6.7b": _opt(4096, 32, 32),
    "Phi-1.3b": {
        "model_type": "phi",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 51_200,
        "max_position_embeddings": 2048,
    },
    "Phi-3": _llama(3072, 32, 32, 8192, 32_064, model_type="phi3"),
    "SmolLM2-135M": _llama(
        576, 30, 9, 1536, 49_152, num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192
    ),
    "Llama-68m": _llama(768, 2, 12, 3072),
    "Llama-2-7B": _llama(4096, 32, 32, 11_008),
    "Llama-2-13B": _llama(5120, 40, 40, 13_824),
    "Vicuna-33B": _llama(6656, 60, 52, 17_920),
    "Mistral-7B": _llama(4096, 32, 32, 14_336, model_type="mistral", num_key_value_heads=8),
}


@dataclass(frozen=True)
class Setting:
    """What a draft is made of; the defaults are the papers' where they say, and Llama-2-13B's best elsewhere.

    gamma         tokens drafted in a row: draft-model passes, heads, autoregressive steps, streams
    nodes         tree nodes that carry streams: 1, the accepted one, whose streams make the draft (trailing), or all
                  that passed the pruning layer (riding; the paper passes 32)
    context       L, tokens in the cache
    layers, rank  N_s and R_s of the stream adapters
    context_top   p of appendix H.1
    window, ngram, guesses  W, N and G of Lookahead, whose branches are rows of the target's own pass
    draft         the draft model: OPT-125m for OPT, Llama-68m for Llama; None: by the target's vocabulary
    """

    gamma: int = 4
    nodes: int = 1
    context: int = 1024
    layers: int = 4
    rank: int = 8
    context_top: int = 64
    window: int = 10
    ngram: int = 5
    guesses: int = 10
    draft: str | None = None


@dataclass(frozen=True)
class Cost:
    """Of one draft, beyond the target's pass over one token.

    parameters  trained or held beside the target
    read        bytes of weights and of a draft model's own cache that are read once more
    operations  multiplications and additions
    """

    parameters: int
    read: int
    operations: int


METHODS = ("draft model", "medusa", "hydra", "eagle", "lookahead", "streams", "streams, optimised")


def target(name: str) -> Decoder:
    """A target of ``MODELS`` on the meta device."""
    if name not in MODELS:
        raise InputError(f"there is no model {name!r} here; models are {', '.join(MODELS)}")
    return build_decoder(model_config(MODELS[name]))


def parameters(module: nn.Module) -> int:
    """Weights of a module, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def cost(method: str, name: str, setting: Setting | None = None) -> Cost:
    """What a draft of ``method`` for the target ``name`` costs. Raises InputError for a name that is not known."""
    return costs(name, setting, methods=(method,))[method]


def costs(name: str, setting: Setting | None = None, *, methods: tuple[str, ...] = METHODS) -> dict[str, Cost]:
    """The costs of several methods for one target, whose shapes are built once."""
    setting = setting or Setting()
    if unknown := [method for method in methods if method not in _COUNTED]:
        raise InputError(f"there is no method {unknown[0]!r} here; methods are {', '.join(METHODS)}")
    decoder = target(name)
    with torch.device("meta"):
        return {method: _COUNTED[method](decoder, setting) for method in methods}


# -- one function a method -----------------------------------------------------------------------------------------
def _draft_model(decoder: Decoder, s: Setting) -> Cost:
    """gamma passes of a small decoder, one after another."""
    small = target(s.draft or ("OPT-125m" if decoder.config.family == "opt" else "Llama-68m"))
    read = _matrices(small)
    cache = 2 * small.config.num_layers * small.config.num_kv_heads * small.config.head_dim * s.context
    attention = small.config.num_layers * _attention(small.config, s.context)
    return Cost(parameters(small), s.gamma * WEIGHT_BYTES * (read + cache), s.gamma * (2 * read + attention))


def _medusa(decoder: Decoder, s: Setting) -> Cost:
    """gamma heads of a residual block and a head of their own: gamma (h^2 + h v) parameters (Cai et al. 2024)."""
    h, v = decoder.config.hidden_size, decoder.config.vocab_size
    heads = nn.ModuleList(nn.Sequential(nn.Linear(h, h), nn.Linear(h, v, bias=False)) for _ in range(s.gamma))
    return _once(heads)


def _hydra(decoder: Decoder, s: Setting) -> Cost:
    """Medusa's heads told the tokens before: head i reads i + 1 embeddings beside the state (Ankner et al. 2024).

    Its block has a second matrix on the way around, since widths differ. One path; a tree runs heads at every node.
    """
    h, v = decoder.config.hidden_size, decoder.config.vocab_size
    heads = nn.ModuleList(
        nn.ModuleList((nn.Linear((i + 2) * h, h), nn.Linear((i + 2) * h, h), nn.Linear(h, v, bias=False)))
        for i in range(s.gamma)
    )
    return _once(heads)


def _eagle(decoder: Decoder, s: Setting) -> Cost:
    """gamma steps of one decoder layer behind a 2h x h matrix, each read out by the target's head (Li et al. 2024)."""
    config = decoder.config
    own = nn.ModuleList((nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False), Block(config)))
    read = _matrices(own) + decoder.head.weight.numel()
    cache = 2 * config.num_kv_heads * config.head_dim * s.context
    operations = 2 * read + _attention(config, s.context)
    return Cost(parameters(own), s.gamma * WEIGHT_BYTES * (read + cache), s.gamma * operations)


def _lookahead(decoder: Decoder, s: Setting) -> Cost:
    """(W + G)(N - 1) more rows in the target's own pass, nothing trained, nothing read again (Fu et al. 2024)."""
    rows = (s.window + s.guesses) * (s.ngram - 1)
    per_row = 2 * _matrices(decoder) + decoder.config.num_layers * _attention(decoder.config, s.context)
    return Cost(0, 0, rows * per_row)


def _streams(decoder: Decoder, s: Setting) -> Cost:
    """Lossless, as written down naively: every node's streams pass through whole layers and the head."""
    adapter = StreamAdapter(decoder.config, replace(_stream_config(s), stream_mlp="mlp+adapter"))
    layer = _matrices(decoder.blocks[0]) + _matrices(adapter.layer(adapter.start))
    rows = s.nodes * s.gamma
    per_row = s.layers * (2 * layer + _attention(decoder.config, s.context)) + 2 * decoder.head.weight.numel()
    return _streamed(decoder, adapter, s, rows * per_row)


def _optimised(decoder: Decoder, s: Setting) -> Cost:
    """Appendix H: p context positions a stream, an adapter in place of the MLP, the head for the accepted node only."""
    adapter = StreamAdapter(decoder.config, replace(_stream_config(s), context_top=s.context_top))
    block = decoder.blocks[0]
    assert isinstance(block, Block)
    layer = _matrices(block.qkv) + _matrices(block.out) + _matrices(adapter.layer(adapter.start))
    seen = min(s.context, s.context_top)
    body = s.nodes * s.gamma * s.layers * (2 * layer + _attention(decoder.config, seen))
    return _streamed(decoder, adapter, s, body + s.gamma * 2 * decoder.head.weight.numel())


_COUNTED = dict(zip(METHODS, (_draft_model, _medusa, _hydra, _eagle, _lookahead, _streams, _optimised), strict=True))


def _stream_config(s: Setting) -> StreamConfig:
    return StreamConfig(num_streams=s.gamma, num_stream_layers=s.layers, adapter_rank=s.rank)


def _streamed(decoder: Decoder, adapter: StreamAdapter, s: Setting, operations: int) -> Cost:
    """The target's weights are read for its own rows anyway; pruning is an early exit through the head at each node."""
    assert adapter.prune is not None
    exits = 2 * s.nodes * (_matrices(adapter.prune) + decoder.head.weight.numel()) if s.nodes > 1 else 0
    return Cost(adapter.num_parameters(), WEIGHT_BYTES * adapter.num_parameters(), operations + exits)


def _once(heads: nn.Module) -> Cost:
    read = _matrices(heads)
    return Cost(parameters(heads), WEIGHT_BYTES * read, 2 * read)


def _matrices(module: nn.Module) -> int:
    """Weights that every row is multiplied by: matrices without embedding tables. A tied head counts."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    return sum(p.numel() for p in module.parameters() if p.dim() == 2 and (id(p) not in tables or id(p) in heads))


def _attention(config: ModelConfig, context: int) -> int:
    """Operations of one query of one layer against ``context`` keys: scores and the weighted sum of values."""
    return 4 * config.num_heads * config.head_dim * context
