"""Count the cost of drafts from modules of a method's shapes; ``analysis.cost`` has the table of methods.

Modules are built on the meta device, so nothing is allocated. Products count 2 operations per weight and row, attention
4 operations per channel, query and key. Norms, embeddings and softmax are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anabranch.model.config import ModelConfig

__all__ = ["WEIGHT_BYTES", "DraftCost", "DraftShape", "attention_operations", "matrix_weights", "parameters"]

WEIGHT_BYTES = 2  # 16 bits, as in the papers' measurements


@dataclass(frozen=True)
class DraftShape:
    """The shape of a draft; the defaults are the papers', or else the best for Llama-2-13B.

    gamma         depth of the draft in tokens: draft-model passes, heads, autoregressive steps or streams
    nodes         tree nodes with speculative rows: 1 if they trail the accepted node, or all nodes kept by the pruning
                  layer if they ride in the pass (32 in the paper)
    context       L, tokens in the KV cache
    layers, rank  number of layers that speculative rows pass through, and the rank of their adapters
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
class DraftCost:
    """The cost of one draft in addition to the target's pass over one token.

    parameters  additional weights in memory
    read        additional bytes read, of weights and of a draft model's own cache
    operations  additional multiplications and additions
    """

    parameters: int
    read: int
    operations: int


def parameters(module: nn.Module) -> int:
    """The number of weights of a module, counting shared ones once."""
    return sum(p.numel() for p in module.parameters())


def matrix_weights(module: nn.Module) -> int:
    """The number of weights that each row is multiplied by: matrices, a tied head included, without embeddings."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)}
    return sum(p.numel() for p in module.parameters() if p.dim() == 2 and (id(p) not in tables or id(p) in heads))


def attention_operations(config: ModelConfig, context: int) -> int:
    """Operations of one query in one layer against ``context`` keys: scores and the weighted sum of values."""
    return 4 * config.num_heads * config.head_dim * context
