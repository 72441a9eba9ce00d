"""From stream states to draft trees: chains, full product trees, and best-first trees under a node budget.

Depth-d nodes come from stream d of the accepted node. Every parent on the frontier gets its k best children; a node's
joint log probability is the sum along its path. Best-first keeps the ``nodes`` most probable ones: a sum of log
probabilities falls along a path, so the best nodes of all levels together form a tree, and growing it level by level
finds the same nodes as a heap would.

B rows of the batch, F frontier nodes, S streams, V vocabulary, Vd draft vocabulary, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import InputError
from anabranch.model.decoder import Decoder
from anabranch.model.pack import PackedLinear
from anabranch.sampling import SamplingParams, inverse_cdf, target_probs
from anabranch.streams.adapter import StreamAdapter
from anabranch.tree import DraftTree

__all__ = ["DraftOptions", "StreamDraft"]


@dataclass(frozen=True)
class DraftOptions:
    """How stream states become a tree.

    tree       "best": the ``nodes`` most probable nodes; "product": all of the top-k product tree; "chain"
    nodes      node budget of a best-first tree, root included
    k          children a node may have
    depth      streams used; 0: all of the adapter's (gamma)
    frontier   nodes of one level that are expanded (best-first); bounds the cost of conditioned scoring
    shortlist  conditioned scores are computed for that many of each stream's own best tokens; 0: for the whole draft
               vocabulary
    condition  use the adapter's conditioning if it has one
    """

    tree: Literal["best", "product", "chain"] = "best"
    nodes: int = 32
    k: int = 8
    depth: int = 0
    frontier: int = 12
    shortlist: int = 0
    condition: bool = True

    def __post_init__(self) -> None:
        if self.tree not in ("best", "product", "chain"):
            raise InputError(f"tree must be best, product or chain, not {self.tree!r}")
        for name, low in (("nodes", 2), ("k", 1), ("depth", 0), ("frontier", 1), ("shortlist", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InputError(f"{name} must be a whole number of at least {low}, not {value!r}")
        if self.tree == "product" and sum(self.k**d for d in range((self.depth or 4) + 1)) > 1024:
            raise InputError(
                f"a product tree of {self.k} children over {self.depth or 4} streams has more than 1,024 nodes; "
                "lower k or depth, or use tree=best with a node budget"
            )


@dataclass
class _Level:
    """Candidates of one depth: tokens, joint log probabilities and parent slot in the frontier above, each [B, F k]."""

    tokens: Tensor
    joint: Tensor
    parents: Tensor


class StreamDraft:
    """Builds trees for one target and adapter."""

    def __init__(self, target: Decoder, adapter: StreamAdapter, options: DraftOptions | None = None) -> None:
        self.options = options or DraftOptions()
        gamma = adapter.config.num_streams
        if self.options.depth > gamma:
            raise InputError(f"depth is {self.options.depth}, but the adapter has only {gamma} streams")
        self.target, self.adapter = target, adapter
        self.depth = self.options.depth or gamma
        self.conditioner = adapter.conditioner if self.options.condition else None
        self.vocabulary = adapter.vocabulary.to(target.device)
        whole = len(self.vocabulary) == target.config.vocab_size
        # a copy of the frequent tokens' head rows: reading them is what a draft costs
        self.head_VD = target.head.weight if whole else target.head.weight[self.vocabulary].contiguous()
        self.bias_V = None if target.head.bias is None else target.head.bias[self.vocabulary]
        packs = isinstance(target.head, PackedLinear)
        self.head: Callable[[Tensor], Tensor] = (
            PackedLinear(self.head_VD, self.bias_V) if packs else partial(F.linear, weight=self.head_VD, bias=self.bias_V)
        )

    def logits(self, states: Tensor, shortlist: Tensor | None = None) -> Tensor:
        """Scores over the draft vocabulary [..., Vd], or over ``shortlist`` [B, n] of it: [B, F, n]."""
        if shortlist is None:
            z = self.head(states)
        else:
            z = states @ self.head_VD[shortlist].transpose(-1, -2)
            if self.bias_V is not None:
                z = z + self.bias_V[shortlist][:, None]
        z = z.float()
        cap = self.target.config.logit_softcap
        return z if cap is None else torch.tanh(z / cap) * cap

    def condition(self, states: Tensor, tokens: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Stream states [B, F, D] told the parents' tokens [B, F]; unchanged without a conditioner."""
        if self.conditioner is None:
            return states, None
        return self.conditioner(states, self.target.embedding(tokens), carried)  # type: ignore[no-any-return]

    # -- deterministic trees ------------------------------------------------------------------------
    @torch.inference_mode()
    def build(self, states_BSD: Tensor, roots: list[int]) -> list[DraftTree]:
        """One tree a row from stream states after the last norm [B, S, D] and the rows' root tokens."""
        levels = self._grow(states_BSD, torch.tensor(roots, device=states_BSD.device))
        host = [(x.tokens.cpu().numpy(), x.joint.cpu().numpy(), x.parents.cpu().numpy()) for x in levels]
        budget = self.options.nodes if self.options.tree == "best" else None
        return [_collect(root, [(t[b], j[b], p[b]) for t, j, p in host], budget) for b, root in enumerate(roots)]

    def _grow(self, states_BSD: Tensor, roots_B: Tensor) -> list[_Level]:
        options = self.options
        k = 1 if options.tree == "chain" else options.k
        rows = len(roots_B)
        tokens, joint = roots_B[:, None], torch.zeros(rows, 1, device=roots_B.device)
        carried: Tensor | None = None
        shortlists: Tensor | None = None
        if options.shortlist and self.conditioner is not None:
            n = min(options.shortlist, len(self.vocabulary))
            shortlists = self.logits(states_BSD[:, : self.depth]).topk(n, dim=-1).indices
        levels: list[_Level] = []
        for d in range(self.depth):
            states = states_BSD[:, d : d + 1]
            shortlist = None if shortlists is None else shortlists[:, d]
            if self.conditioner is not None:
                states, carried = self.condition(states.expand(-1, tokens.shape[1], -1), tokens, carried)
            log_probs, best = self.logits(states, shortlist).log_softmax(-1).topk(k, dim=-1)
            if shortlist is not None:
                best = shortlist.gather(1, best.flatten(1)).view_as(best)
            f = tokens.shape[1]
            children = self.vocabulary[best].expand(-1, f, -1)
            totals = joint[:, :, None] + log_probs  # without conditioning all parents share their children
            above = torch.arange(f, device=tokens.device)[:, None].expand(rows, f, k)
            level = _Level(children.reshape(rows, -1), totals.reshape(rows, -1), above.reshape(rows, -1))
            width = level.tokens.shape[1]
            if options.tree == "best" and width > options.frontier:
                # what is not expanded may still be a leaf, so it stays a candidate behind the frontier
                keep = min(width, options.nodes - 1)
                order = level.joint.topk(keep, dim=-1).indices
                level = _Level(*(x.gather(1, order) for x in (level.tokens, level.joint, level.parents)))
                width = min(options.frontier, keep)
            levels.append(level)
            tokens, joint = level.tokens[:, :width], level.joint[:, :width]
            if carried is not None:
                index = level.parents[:, :width, None].expand(-1, -1, carried.shape[-1])
                carried = carried.gather(1, index)
        return levels

    # -- sampled trees, which carry the law they were drawn from --------------------------------------
    @torch.inference_mode()
    def sample(
        self, states_SD: Tensor, root: int, params: SamplingParams, noise: np.random.Generator, *, depth: int
    ) -> DraftTree:
        """A tree of k children a node *sampled* from the streams' law, for the rule *reject* (ACL eq. 9).

        The law is the target's own transformation (temperature, top-k, ...) of the stream scores. Returns the
        product tree of k children over at most ``depth`` streams (k = 1: a chain) with ``draft_probs`` [N, V].
        """
        k = 1 if self.options.tree == "chain" else self.options.k
        vocabulary = self.target.config.vocab_size
        tokens, parents, laws = [root], [-1], []
        carried: Tensor | None = None
        frontier = [0]
        for d in range(min(self.depth, depth)):
            above = torch.tensor([[tokens[i] for i in frontier]], device=states_SD.device)
            states, carried = self.condition(states_SD[d].expand(1, len(frontier), -1), above, carried)
            scores = torch.full((len(frontier), vocabulary), float("-inf"), device=states_SD.device)
            scores[:, self.vocabulary] = self.logits(states)[0]
            q = target_probs(scores, params)
            laws.append(q)
            uniforms = noise.random((k, len(frontier)))
            drawn = np.stack([inverse_cdf(q, row).cpu().numpy() for row in uniforms], axis=1)
            slots = np.repeat(np.arange(len(frontier)), k)
            if carried is not None:
                carried = carried[:, torch.from_numpy(slots).to(carried.device)]
            parents += [frontier[slot] for slot in slots]
            frontier = list(range(len(tokens), len(tokens) + len(slots)))
            tokens += drawn.reshape(-1).tolist()
        leaves = torch.zeros(len(frontier), vocabulary, device=states_SD.device)
        depths = np.zeros(len(tokens), np.int64)
        for i in range(1, len(tokens)):
            depths[i] = depths[parents[i]] + 1
        return DraftTree(
            np.asarray(tokens, np.int64),
            np.asarray(parents, np.int64),
            draft_probs=torch.cat((*laws, leaves)),
            replacement=True,
            sources=_sources(depths),
        )


def _sources(depths: NDArray[np.int64]) -> tuple[str, ...]:
    return tuple("target" if d == 0 else f"stream {d}" for d in depths.tolist())


Candidates = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


def _collect(root: int, levels: list[Candidates], budget: int | None) -> DraftTree:
    """The tree of the ``budget`` best candidates of all levels (all of them if None), breadth first."""
    sizes = [len(tokens) for tokens, _, _ in levels]
    joint = np.concatenate([j for _, j, _ in levels])
    depth = np.repeat(np.arange(1, len(levels) + 1), sizes)
    if budget is not None and len(joint) > budget - 1:
        # stable: of equals the shallower one first, so that no node is kept without its parent
        chosen = np.sort(np.argsort(-joint, kind="stable")[: budget - 1])
    else:
        chosen = np.arange(len(joint))
    offsets = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    above = np.concatenate([p + (offsets[i - 1] if i else 0) for i, (_, _, p) in enumerate(levels)])
    place = np.full(len(joint), -1)
    place[chosen] = np.arange(1, len(chosen) + 1)
    parents = np.where(depth[chosen] == 1, 0, place[above[chosen]])
    assert (parents >= 0).all(), "a draft node lost its parent"
    tokens = np.concatenate([t for t, _, _ in levels])[chosen]
    depths = np.concatenate(([0], depth[chosen]))
    return DraftTree(
        np.concatenate(([root], tokens)).astype(np.int64),
        np.concatenate(([-1], parents)).astype(np.int64),
        sources=_sources(depths),
        log_probs=np.concatenate(([0.0], joint[chosen])).astype(np.float32),
    )
