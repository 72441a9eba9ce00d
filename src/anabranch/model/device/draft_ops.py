"""Fused operations that grow a best-first tree from stream states on a GPU: seven kernels a level, one at the end.

    condition   the inputs of the conditioning term at each frontier node
    product     its gated state
    product     the states of the frontier, conditioned
    product     their scores over the draft vocabulary
    own_scores  their scores of the row's own tokens
    best        the k best tokens of each node
    level       the best candidates of the level, of which the first are the next frontier
    select      the best candidates of all levels: the tree, as the pass that verifies it takes it

Candidates of all levels lie in one table [B, T]: tokens, joint log probabilities, and the index of each one's parent.

B rows of the batch, F frontier nodes, S streams, k children of a node, T candidates, N nodes of the tree, W nodes that
it is padded to, V draft vocabulary, X own tokens of a row, Z conditioning width, D model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.model.device.ops import operation

__all__ = ["condition"]


@operation()
def condition(
    embedding: Tensor,
    tokens_BF: Tensor,
    states_BSD: Tensor,
    level: int,
    path: bool,
    carried: Tensor | None,
    parents_BF: Tensor,
    first: int,
    width: int,
) -> Tensor:
    """Inputs [B F, D + D + Z] of the conditioning term: embeddings at unit RMS, the level's states, the carried states.

    path     without it the embeddings alone [B F, D]
    carried  of the frontier above [B F', Z], whose nodes lie in the table from ``first`` on; None: zeros
    width    Z
    """
    b, f = tokens_BF.shape
    token = F.rms_norm(embedding[tokens_BF].to(states_BSD.dtype), (embedding.shape[1],))
    if not path:
        return token.flatten(0, 1)
    state = states_BSD[:, level : level + 1].expand(b, f, -1)
    if carried is None:
        kept = state.new_zeros(b, f, width)
    else:
        kept = carried.view(b, -1, width).gather(1, (parents_BF - first)[:, :, None].expand(b, f, width))
    return torch.cat((token, state, kept), dim=-1).flatten(0, 1)


@operation()
def own_scores(states_MD: Tensor, head: Tensor, ids_BX: Tensor, counts_B: Tensor) -> Tensor:
    """Scores [M, X] of the first ``counts_B`` of each row's own tokens; -inf for the others."""
    b, x = ids_BX.shape
    scores = states_MD.view(b, -1, states_MD.shape[1]) @ head[ids_BX].transpose(1, 2)
    unused = torch.arange(x) >= counts_B[:, None]
    return scores.masked_fill(unused[:, None], float("-inf")).flatten(0, 1)


@operation()
def best(scores_MV: Tensor, own_MX: Tensor, vocabulary_V: Tensor, own_ids_BX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log probabilities and tokens [M, k] of the best scores, best first; -inf where a state overflowed."""
    every = torch.cat((scores_MV, own_MX), dim=-1).float().log_softmax(-1)
    log_probs, places = (part[:, :k] for part in every.sort(dim=-1, descending=True, stable=True))
    m, b = len(scores_MV), len(own_ids_BX)
    ids = torch.cat((vocabulary_V.expand(b, -1), own_ids_BX), dim=1).repeat_interleave(m // b, dim=0)
    log_probs = log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return log_probs, ids.gather(1, places).where(log_probs > -torch.inf, 0)


@operation("table_tokens", "table_joint", "table_parents")
def level(
    log_probs_Mk: Tensor,
    tokens_Mk: Tensor,
    frontier: int,
    above: int,
    start: int,
    most: int,
    table_tokens: Tensor,
    table_joint: Tensor,
    table_parents: Tensor,
) -> None:
    """Write the ``most`` best candidates of a level to the table from ``start`` on, best first.

    frontier  F: the nodes whose children they are lie in the table from ``above`` on; above -1: the root, of joint 0
    """
    b = len(table_tokens)
    log_probs = log_probs_Mk.view(b, frontier, -1)
    if above >= 0:
        log_probs = log_probs + table_joint[:, above : above + frontier, None]
    joint, order = log_probs.flatten(1).sort(dim=-1, descending=True, stable=True)
    joint, order = joint[:, :most], order[:, :most]
    where = slice(start, start + most)
    table_joint[:, where] = joint
    table_tokens[:, where] = tokens_Mk.view(b, -1).gather(1, order)
    table_parents[:, where] = order // log_probs.shape[2] + above if above >= 0 else -1


@operation()
def select(
    tokens_BT: Tensor,
    joint_BT: Tensor,
    parents_BT: Tensor,
    roots_B: Tensor,
    lengths_B: Tensor,
    nodes: int,
    width: int,
    floor: float,
) -> Tensor:
    """The tree of the root and the ``nodes`` - 1 best candidates above ``floor``, by rank; among equals the first.

    Returns tokens [B W], parents [B W], ``lengths_B`` [B] and the bits of joint log probabilities [B W] in one tensor,
    as ``GraphBackend`` takes them; padding has the parent -1.
    """
    b = len(tokens_BT)
    tokens, parents = torch.zeros(b, width, dtype=torch.int64), torch.full((b, width), -1)
    joint = torch.zeros(b, width)
    order_BT = joint_BT.sort(dim=-1, descending=True, stable=True).indices
    tokens[:, 0] = roots_B
    for row in range(b):
        place = {-1: 0}
        for node, candidate in enumerate(order_BT[row, : nodes - 1].tolist(), 1):
            if not joint_BT[row, candidate] >= floor or joint_BT[row, candidate] == -torch.inf:
                break
            place[candidate] = node
            tokens[row, node], joint[row, node] = tokens_BT[row, candidate], joint_BT[row, candidate]
            parents[row, node] = place[int(parents_BT[row, candidate])]
    return torch.cat((tokens.flatten(), parents.flatten(), lengths_B, joint.flatten().view(torch.int32).long()))
