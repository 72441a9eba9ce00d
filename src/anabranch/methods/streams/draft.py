"""Build draft trees from stream states: chains, full product trees, and best-first trees under a node budget.

Nodes of depth d come from stream d of the accepted node. Every parent on the frontier gets its k best children; a
node's joint log probability is the sum along its path. Best-first trees keep the ``nodes`` most probable ones: since
log probabilities fall along a path, the best nodes of all levels form a tree, and building it level by level gives the
same nodes as a heap.

B rows of the batch, F frontier nodes, S streams, V vocabulary, Vd draft vocabulary, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import InputError
from anabranch.memory import give_back
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.kernels import DraftConfig, StreamKernels
from anabranch.model.decoder import Decoder
from anabranch.model.graphs import Graphs
from anabranch.model.native_linear import NativeLinear, table_of
from anabranch.model.pack import packed_like
from anabranch.native import library as native
from anabranch.sampling import SamplingParams, gumbels_of, halves, inverse_cdf, target_probs
from anabranch.tree import DraftTree

__all__ = ["DraftOptions", "DrawNoise", "RowVocabulary", "StreamDraft"]

# Confidence in a stream's sampled tokens: (scores + noise) times this are the logits of its acceptance probability.
# Measured with the default model at temperature 1 (docs/log.md).
TRUST = 0.85
SCORES: Literal["int8"] = "int8"  # quantisation of the draft head, finer than that of other weights of drafts
# Number of blocks of 32 draft tokens for which the kernels compute conditioned scores: those with a stream's best
# tokens without conditioning; at least four times the nodes of a tree (docs/log.md).
BLOCKS = 64
OWN = 64  # in CUDA graphs the rows' own tokens are padded to a multiple of this, for few distinct shapes
MOST_NODES = 1024  # limit of a product tree, which grows with k ** depth


@dataclass(frozen=True)
class DraftOptions:
    """Options for building trees from stream states.

    tree       "best": the ``nodes`` most probable nodes; "product": the full top-k product tree; "chain"
    nodes      node budget of a best-first tree, counting the root
    k          maximum number of children of a node (in a best-first tree at most its number of nodes)
    depth      number of streams to use; 0: all of the adapter's (gamma), but fewer for small best-first trees: two for
               three nodes
    frontier   maximum number of expanded nodes per level (best-first); limits the cost of conditioned scoring
    threshold  minimum joint probability of a node (best-first), for targets on which every verified node costs time
    shortlist  compute conditioned scores for this many of each stream's best tokens; 0: for the whole draft vocabulary,
               of which the native kernels skip the least probable blocks (``BLOCKS``)
    condition  use the adapter's conditioning if it has any
    """

    tree: Literal["best", "product", "chain"] = "best"
    nodes: int = 16
    k: int = 16
    depth: int = 0
    frontier: int = 12
    threshold: float = 0.0
    shortlist: int = 0
    condition: bool = True

    def __post_init__(self) -> None:
        if self.tree not in ("best", "product", "chain"):
            raise InputError(f"tree must be best, product or chain, got {self.tree!r}")
        for name, low in (("nodes", 2), ("k", 1), ("depth", 0), ("frontier", 1), ("shortlist", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InputError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if not 0.0 <= self.threshold < 1.0:
            raise InputError(f"threshold must be a probability of at least 0 and below 1, got {self.threshold!r}")
        if self.depth:
            self.check_size(self.depth)

    def streams(self, gamma: int) -> int:
        """The number of an adapter's ``gamma`` streams that are used."""
        if self.depth or self.tree != "best":
            return self.depth or gamma
        return min(gamma, self.nodes - 1, -(-2 * self.nodes // 3))

    @property
    def children(self) -> int:
        """The number of candidate children per node."""
        if self.tree == "chain":
            return 1
        return min(self.k, self.nodes - 1) if self.tree == "best" else self.k

    def check_size(self, depth: int) -> None:
        """Raise InputError for a product tree over ``depth`` streams that is too large to verify."""
        if self.tree == "product" and sum(self.k**d for d in range(depth + 1)) > MOST_NODES:
            raise InputError(
                f"a product tree of {self.k} children over {depth} streams has more than {MOST_NODES:,} nodes; "
                "lower k or depth, or use tree=best with a node budget"
            )


@dataclass(frozen=True)
class DrawNoise:
    """The noise for drafting sampled tokens of a row: the temperature, and the keys of the positions by level [D].

    The target samples the argmax of logits / temperature + ``sampling.gumbels``. Streams add the same noise to their
    scores: with the target's scores, every draft would be accepted.
    """

    temperature: float
    keys_D: NDArray[np.uint64]


@dataclass
class _Level:
    """Candidates of one depth: tokens, joint log probabilities and parent slot in the frontier above, each [B, F k]."""

    tokens: Tensor
    joint: Tensor
    parents: Tensor


class RowVocabulary:
    """The tokens of a row's text that are not in the draft vocabulary, with their rows of the head.

    Names and numbers of a prompt are rare in general but frequent in its answer, so they are added to the draft
    vocabulary of this row once they occur in its text.
    """

    def __init__(self, draft: StreamDraft) -> None:
        self._draft = draft
        self._read = 0
        self._known: set[int] = set()
        self._new: list[int] = []
        self.ids = draft.vocabulary[:0]
        self.head_XD = draft.target.head_rows(self.ids)
        self.bias_X = None if draft.bias is None else draft.bias[:0]
        self.head: Callable[[Tensor], Tensor] | None = None  # packed if the target's is

    def extend(self, text: Sequence[int]) -> RowVocabulary:
        """Add the tokens of ``text`` (which only grows) that are new since the last call."""
        common = self._draft.common
        for token in text[self._read :]:
            if token not in common and token not in self._known:
                self._known.add(token)
                self._new.append(token)
        self._read = len(text)
        if self._new:
            ids = torch.tensor(self._new, device=self.ids.device)
            self._new = []
            self.ids = torch.cat((self.ids, ids))
            self.head_XD = torch.cat((self.head_XD, self._draft.target.head_rows(ids)))
            if self.bias_X is not None and self._draft.bias is not None:
                self.bias_X = torch.cat((self.bias_X, self._draft.bias[ids]))
            self.head = packed_like(self._draft.target.head, self.head_XD, self.bias_X, SCORES)
        return self


@dataclass
class _Vocabulary:
    """The vocabulary of a batch of rows: ids [B, V'], and the rows' own part of the head, padded [B, X, D]."""

    ids_BV: Tensor
    own_BXD: Tensor | None = None
    offset_B1X: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None  # if there is only one row


class _DraftHead:
    """The head's rows for an adapter's draft vocabulary, shared by all drafters of the target and the adapter.

    vocabulary  [Vd] token ids on the target's device; ``common`` has the same ids
    bias        [V] of the full head, if it has one
    scores      states [..., D] -> scores of the draft vocabulary [..., Vd]
    """

    def __init__(self, target: Decoder, adapter: StreamModule) -> None:
        self.vocabulary = adapter.vocabulary.to(target.device)
        self.common = frozenset(self.vocabulary.tolist())
        self.bias: Tensor | None = target.head.bias
        # a contiguous copy of the frequent tokens' head rows: reading them dominates the cost of a draft
        whole = len(self.vocabulary) == target.config.vocab_size
        rows = target.head.weight if whole and target.backend.kernels is None else target.head_rows(self.vocabulary)
        bias = None if self.bias is None else self.bias[self.vocabulary]
        packed = packed_like(target.head, rows, bias, SCORES)
        self.scores: Callable[[Tensor], Tensor] = packed or partial(F.linear, weight=rows, bias=bias)
        del rows
        give_back()


class StreamDraft:
    """Builds trees for one target and adapter."""

    def __init__(self, target: Decoder, adapter: StreamModule, options: DraftOptions | None = None) -> None:
        self.options = options or DraftOptions()
        gamma = adapter.shape.num_streams
        if self.options.depth > gamma:
            raise InputError(f"depth is {self.options.depth}, but the adapter has only {gamma} streams")
        self.target, self.adapter = target, adapter
        self.depth = self.options.streams(gamma)
        self.options.check_size(self.depth)
        self.graphs = Graphs()
        self.conditioner = adapter.conditioner if self.options.condition else None
        shared = adapter.shared(target, _DraftHead, lambda: _DraftHead(target, adapter))
        self.vocabulary, self.common, self.bias, self.head = (
            shared.vocabulary,
            shared.common,
            shared.bias,
            shared.scores,
        )
        if self.conditioner is not None:
            self.conditioner.pack(target.head)

    @cached_property
    def native(self) -> NativeDraft | None:
        """The same with the native kernels, if they support it; created on first use, since training needs none."""
        return NativeDraft.of(self)

    def _vocabulary(self, rows: Sequence[RowVocabulary] | None, count: int) -> _Vocabulary:
        ids = self.vocabulary.expand(count, -1)
        widest = max((len(row.ids) for row in rows or ()), default=0)
        if self.target.backend.capture is not None:
            widest = -(-max(widest, 1) // OWN) * OWN  # few shapes
        if rows is None or widest == 0:
            return _Vocabulary(ids)
        if count == 1 and rows[0].head is not None:
            return _Vocabulary(torch.cat((ids, rows[0].ids[None]), dim=1), head=rows[0].head)
        own_ids = torch.zeros(count, widest, dtype=torch.long, device=ids.device)
        width = self.target.config.hidden_size
        own = torch.zeros(count, widest, width, dtype=self.target.dtype, device=ids.device)
        offset = torch.full((count, 1, widest), float("-inf"), device=ids.device)
        for b, row in enumerate(rows):
            n = len(row.ids)
            own_ids[b, :n], own[b, :n] = row.ids, row.head_XD
            offset[b, 0, :n] = 0.0 if row.bias_X is None else row.bias_X.float()
        return _Vocabulary(torch.cat((ids, own_ids), dim=1), own, offset)

    def logits(self, states_BFD: Tensor, words: _Vocabulary) -> Tensor:
        """Scores over the draft vocabulary and the rows' own tokens [B, F, V'], float32."""
        z = self._cap(self.head(states_BFD).float())
        if words.head is not None:
            return torch.cat((z, self._cap(words.head(states_BFD).float())), dim=-1)
        if words.own_BXD is None or words.offset_B1X is None:
            return z
        own = (states_BFD.to(words.own_BXD.dtype) @ words.own_BXD.transpose(1, 2)).float() + words.offset_B1X
        # mask padding again: the soft cap makes minus infinity finite
        return torch.cat((z, self._cap(own).masked_fill(words.offset_B1X.isinf(), float("-inf"))), dim=-1)

    def _shortlist_logits(self, states_BFD: Tensor, tokens_Bn: Tensor) -> Tensor:
        rows_BnD = self.target.head_rows(tokens_Bn)
        z = (states_BFD.to(rows_BnD.dtype) @ rows_BnD.transpose(1, 2)).float()
        return self._cap(z if self.bias is None else z + self.bias[tokens_Bn][:, None])

    def _cap(self, z: Tensor) -> Tensor:
        cap = self.target.config.logit_softcap
        return z if cap is None else torch.tanh(z / cap) * cap

    def condition(self, states: Tensor, tokens: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A stream's states [B, 1, D] conditioned on parent tokens [B, F]: [B, F, D], or unchanged."""
        if self.conditioner is None:
            return states, None
        return self.conditioner(states, self.target.embedding(tokens), carried)  # type: ignore[no-any-return]

    # -- deterministic trees ------------------------------------------------------------------------
    def build(
        self,
        states_BSD: Tensor | Sequence[Tensor],
        roots: list[int],
        rows: Sequence[RowVocabulary] | None = None,
        noise: Sequence[DrawNoise | None] | None = None,
    ) -> list[DraftTree]:
        """One tree per row from stream states after the last norm [B, S, D] and the rows' root tokens.

        ``rows`` add each row's own tokens to the draft vocabulary; ``noise`` is that of the rows that are sampled.
        """
        noise = [None] * len(roots) if noise is None else noise
        if self.native is not None:
            own = [None] * len(roots) if rows is None else rows
            return list(map(self.native, states_BSD, roots, own, noise))
        whole = states_BSD if isinstance(states_BSD, Tensor) else torch.stack(list(states_BSD))
        return self._build(whole, roots, rows, noise)

    @torch.inference_mode()
    def _build(
        self,
        states_BSD: Tensor,
        roots: list[int],
        rows: Sequence[RowVocabulary] | None,
        noise: Sequence[DrawNoise | None],
    ) -> list[DraftTree]:
        options = self.options
        budget = options.nodes if options.tree == "best" else None
        floor = math.log(options.threshold) if options.threshold else -math.inf
        levels = self._captured(states_BSD, torch.tensor(roots), self._vocabulary(rows, len(roots)), self._drawn(noise))
        host = _to_host(levels)
        return [
            _collect(root, [(t[b], j[b], p[b]) for t, j, p in host], budget, floor, self.adapter.predictor)
            for b, root in enumerate(roots)
        ]

    def _drawn(self, noise: Sequence[DrawNoise | None]) -> tuple[Tensor, ...]:
        """The noise of rows as tensors: halves of keys [B, D], temperatures [B], and whether a row is sampled [B]."""
        if not any(noise):
            return ()
        keys_BD = np.stack([np.zeros(self.depth, np.uint64) if n is None else n.keys_D[: self.depth] for n in noise])
        temperatures_B = torch.tensor([1.0 if n is None else n.temperature for n in noise])
        return *halves(keys_BD), temperatures_B, torch.tensor([n is not None for n in noise])

    def _captured(
        self, states_BSD: Tensor, roots_B: Tensor, words: _Vocabulary, drawn: tuple[Tensor, ...]
    ) -> list[_Level]:
        """``_grow``, captured as a graph where the backend captures them."""
        own = () if words.own_BXD is None or words.offset_B1X is None else (words.own_BXD, words.offset_B1X)

        def compute(states_BSD: Tensor, roots_B: Tensor, ids_BV: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
            told = replace(words, ids_BV=ids_BV)
            if own:
                told.own_BXD, told.offset_B1X = more[: len(own)]
            levels = self._grow(states_BSD, roots_B, told, more[len(own) :])
            return tuple(part for level in levels for part in (level.tokens, level.joint, level.parents))

        key, inputs = (words.ids_BV.shape, len(drawn)), (states_BSD, roots_B, words.ids_BV, *own, *drawn)
        found = self.graphs.run(self.target.backend.capture, key, compute, inputs, states_BSD.device)
        return [_Level(*found[i : i + 3]) for i in range(0, len(found), 3)]

    def _grow(self, states_BSD: Tensor, roots_B: Tensor, words: _Vocabulary, drawn: tuple[Tensor, ...]) -> list[_Level]:
        options = self.options
        k = options.children
        tokens, joint = roots_B[:, None], torch.zeros(len(roots_B), 1, device=roots_B.device)
        carried: Tensor | None = None
        shortlists: Tensor | None = None
        if options.shortlist and self.conditioner is not None:
            n = min(options.shortlist, words.ids_BV.shape[1])
            best = self.logits(states_BSD[:, : self.depth], words).topk(n, dim=-1).indices
            shortlists = words.ids_BV.gather(1, best.flatten(1)).view_as(best)
        levels: list[_Level] = []
        for d in range(self.depth):
            states, carried = self.condition(states_BSD[:, d : d + 1], tokens, carried)
            ids = words.ids_BV if shortlists is None else shortlists[:, d]
            scores = self.logits(states, words) if shortlists is None else self._shortlist_logits(states, ids)
            if drawn:
                low_BD, high_BD, temperatures_B, draws_B = drawn
                own_BV = gumbels_of(low_BD[:, d : d + 1], high_BD[:, d : d + 1], ids)
                noisy = (scores / temperatures_B[:, None, None] + own_BV[:, None]) * TRUST
                scores = torch.where(draws_B[:, None, None], noisy, scores)
            log_probs, best = self._best(scores, min(k, ids.shape[1]))
            log_probs = log_probs.nan_to_num(nan=-math.inf, neginf=-math.inf)  # states may have overflowed
            level = _children(ids, best, joint[:, :, None] + log_probs)
            width = level.tokens.shape[1]
            if options.tree == "best":
                # nodes that are not expanded may still be leaves, so they stay candidates after the frontier
                keep = min(width, options.nodes - 1)
                joint_falling, order = level.joint.topk(keep, dim=-1)
                level = _Level(level.tokens.gather(1, order), joint_falling, level.parents.gather(1, order))
                width = min(options.frontier, keep)
                if states.device.type == "cpu" and self.target.backend.capture is None:
                    width = self._worth_expanding([*levels, level], width)
            levels.append(level)
            if width == 0:
                break
            tokens, joint = level.tokens[:, :width], level.joint[:, :width]
            if carried is not None:
                index = level.parents[:, :width, None].expand(-1, -1, carried.shape[-1])
                carried = carried.gather(1, index)
        return levels

    def _best(self, scores_BFV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The log probabilities and indices [B, F, k] of the k best tokens."""
        if not isinstance(self.head, NativeLinear):
            return scores_BFV.log_softmax(-1).topk(k, dim=-1)
        values, places = self.head.kernels.best(scores_BFV.flatten(0, 1), k)
        return values.view(*scores_BFV.shape[:2], k), places.view(*scores_BFV.shape[:2], k)

    def _worth_expanding(self, levels: list[_Level], width: int) -> int:
        """How many of the last level's nodes, best first, may have children within the budget, in any row.

        A child is no more probable than its parent, so a parent below the budget's least probable node has none. Not on
        a GPU, where reading this on the host costs more than a few rows.
        """
        joint = torch.cat([level.joint for level in levels], dim=1)
        budget = self.options.nodes - 1
        if joint.shape[1] <= budget:
            return width
        least = joint.topk(budget, dim=-1).values[:, -1:]
        return min(width, int((levels[-1].joint > least).sum(1).max()))

    # -- sampled trees, with the distributions they were sampled from ---------------------------------
    @torch.inference_mode()
    def sample(
        self,
        states_SD: Tensor,
        root: int,
        params: SamplingParams,
        noise: np.random.Generator,
        *,
        depth: int,
        row: RowVocabulary | None = None,
    ) -> DraftTree:
        """A tree of k children per node, *sampled* from the streams' distributions, for the rejection rule (ACL eq. 9).

        The distributions are the stream scores transformed like the target's logits (temperature, top-k, ...). Returns
        the product tree of k children over at most ``depth`` streams (k = 1: a chain) with ``draft_probs`` [N, V].
        """
        k = self.options.children
        vocabulary = self.target.config.vocab_size
        words = self._vocabulary(None if row is None else [row], 1)
        tokens, parents, probs = [root], [-1], []
        carried: Tensor | None = None
        frontier = [0]
        for d in range(min(self.depth, depth)):
            above = torch.tensor([[tokens[i] for i in frontier]], device=states_SD.device)
            states, carried = self.condition(states_SD[None, d : d + 1], above, carried)
            scores = torch.full((len(frontier), vocabulary), float("-inf"), device=states_SD.device)
            scores[:, words.ids_BV[0]] = self.logits(states, words)[0].expand(len(frontier), -1)
            q = target_probs(scores, params)
            probs.append(q)
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
            draft_probs=torch.cat((*probs, leaves)),
            replacement=True,
            sources=_sources(depths, self.adapter.predictor),
        )


class NativeDraft:
    """Builds the tree of one row with the native kernels: conditioning, scoring and selection in one call."""

    def __init__(self, draft: StreamDraft, linears: dict[str, NativeLinear], head: NativeLinear) -> None:
        options, chain = draft.options, draft.options.tree == "chain"
        self._kernels, self._sources = (
            StreamKernels(head.kernels),
            _sources(np.arange(draft.depth + 1), draft.adapter.predictor),
        )
        self._kept = (linears, head, draft.vocabulary, draft.target.embedding)
        self._config = DraftConfig(
            embedding=table_of(draft.target),
            head=head.packed,
            ids=draft.vocabulary.data_ptr(),
            d=draft.target.config.hidden_size,
            depth=draft.depth,
            children=min(options.children, len(draft.vocabulary)),
            nodes=draft.depth + 1 if chain else options.nodes,
            frontier=1 if chain else options.frontier,
            blocks=max(BLOCKS, 4 * options.nodes),
            noise_scale=TRUST,
            min_log_prob=math.log(options.threshold) if options.threshold and not chain else -math.inf,
            **{name: linear.packed for name, linear in linears.items()},
        )

    @staticmethod
    def of(draft: StreamDraft) -> NativeDraft | None:
        """None unless the target runs on the kernels, with best-first trees or chains, conditioned on paths or not."""
        conditioner, width = draft.conditioner, draft.target.config.hidden_size
        if not isinstance(draft.head, NativeLinear):
            return None
        terms = {} if conditioner is None else conditioner.packed
        linears = {name: linear for name, linear in terms.items() if isinstance(linear, NativeLinear)}
        known = conditioner is None or (len(linears) == 4 and conditioner.rank % native.BLOCK == 0)
        known = known and width % native.BLOCK == 0
        plain = draft.options.tree != "product" and not draft.options.shortlist and draft.bias is None
        if (
            not (known and plain and width <= native.MAX_EMBEDDING_WIDTH)
            or draft.target.config.logit_softcap is not None
        ):
            return None
        return NativeDraft(draft, linears, draft.head)

    def __call__(self, states_SD: Tensor, root: int, row: RowVocabulary | None, noise: DrawNoise | None) -> DraftTree:
        """The tree of one row."""
        keys = None if noise is None else np.ascontiguousarray(noise.keys_D)
        self._config.keys = None if keys is None else keys.ctypes.data
        self._config.score_scale = 1.0 if noise is None else TRUST / noise.temperature
        own = None if row is None else row.head
        if isinstance(own, NativeLinear):
            assert row is not None
            self._config.row_head, self._config.row_ids = own.packed, row.ids.data_ptr()
        else:
            self._config.row_head, self._config.row_ids = native.Packed(), None
        tokens, parents, depths, log_probs = self._kernels.draft(self._config, states_SD, root)
        sources = tuple([self._sources[depth] for depth in depths.tolist()])
        return DraftTree(tokens, parents, sources=sources, log_probs=log_probs)


def _children(ids_BV: Tensor, best_BFk: Tensor, joint_BFk: Tensor) -> _Level:
    """The k best children of every frontier node; without conditioning they are the same for all nodes of a row."""
    rows, f, k = joint_BFk.shape
    children = ids_BV.gather(1, best_BFk.flatten(1)).view_as(best_BFk).expand(-1, f, -1)
    above = torch.arange(f, device=ids_BV.device)[:, None].expand(rows, f, k)
    return _Level(children.reshape(rows, -1), joint_BFk.reshape(rows, -1), above.reshape(rows, -1))


def _sources(depths: NDArray[np.int64], predictor: str) -> tuple[str, ...]:
    return tuple("target" if d == 0 else f"{predictor} {d}" for d in depths.tolist())


Candidates = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


def _to_host(levels: Sequence[_Level]) -> list[Candidates]:
    """Tokens, joint log probabilities and parents [B, n] of all rows, in one transfer: float64 represents all three."""
    each = [torch.stack((level.tokens.double(), level.joint.double(), level.parents.double())) for level in levels]
    host = torch.cat(each, dim=-1).cpu().numpy()
    bounds = np.cumsum([level.tokens.shape[1] for level in levels])[:-1]
    split = np.split(host, bounds, axis=-1)
    return [(t.astype(np.int64), j.astype(np.float32), p.astype(np.int64)) for t, j, p in split]


def _collect(root: int, levels: list[Candidates], budget: int | None, floor: float, predictor: str) -> DraftTree:
    """The tree of the ``budget`` best candidates of all levels (None: all), breadth first.

    ``floor`` is the minimum joint log probability of a node, ``predictor`` names its source.
    """
    sizes = [len(tokens) for tokens, _, _ in levels]
    joint = np.concatenate([j for _, j, _ in levels])
    depth = np.repeat(np.arange(1, len(levels) + 1), sizes)
    if budget is None:
        chosen = np.arange(len(joint))
    else:
        # stable sort: among equals the shallower one comes first, so that no node is kept without its parent
        best = np.argsort(-joint, kind="stable")[: budget - 1]
        chosen = np.sort(best[joint[best] >= floor])
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
        sources=_sources(depths, predictor),
        log_probs=np.concatenate(([0.0], joint[chosen])).astype(np.float32),
    )
