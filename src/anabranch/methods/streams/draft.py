"""Build draft trees from stream states: chains, full product trees, and best-first trees under a node budget.

Nodes of depth d come from stream d of the accepted node (``grow_tensors``); the native kernels do the same in one call.

B rows of the batch, F frontier nodes, S streams, V vocabulary, Vd draft vocabulary, D model width.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.drafting.draws import CONFIDENCE
from anabranch.drafting.grow import Form, Growth, Node, by_depth, grow, product_size
from anabranch.drafting.grow_tensors import Level, grow_tensors, trees_of
from anabranch.drafting.head import DraftHead, Drawn, DrawNoise, RowVocabulary, Words
from anabranch.drafting.settings import TreeSettings
from anabranch.errors import InputError
from anabranch.methods.streams.adapter import StreamModule
from anabranch.methods.streams.copying import ALONE, COPIED, MIXED
from anabranch.methods.streams.kernels import DraftConfig, DraftedNodes, StreamKernels
from anabranch.methods.streams.scorer import Conditioner
from anabranch.model.decoder import Decoder
from anabranch.model.graphs import Graphs
from anabranch.model.native_linear import NativeLinear, table_of
from anabranch.native import library as native
from anabranch.native import structs
from anabranch.native.arguments import BLOCK, address
from anabranch.sampling import SamplingParams, target_probs
from anabranch.tree import DraftTree

__all__ = ["NativeDraft", "StreamDraft", "StreamSettings", "StreamTrees"]

# Number of blocks of 32 draft tokens for which the kernels compute conditioned scores: those with a stream's best
# tokens without conditioning; at least four times the nodes of a tree (docs/log.md).
BLOCKS = 64
COPY_STEPS = 16  # the weight of copied tokens is rounded to multiples of 1 / COPY_STEPS


@dataclass(frozen=True)
class StreamTrees(TreeSettings):
    """Settings of trees from streams or masks.

    tree       best, product, chain, auto (best, sized by the load), or a number: best with so many nodes
    nodes      node budget of a best-first tree, counting the root; 0: 16, or with tree=auto 24
    k          maximum number of children of a node; 0: 16, or in a product tree 3
    depth      number of streams or masks used; 0: all, but fewer in small best-first trees
    frontier   maximum number of nodes expanded per level (best-first)
    threshold  minimum joint probability of a node (best-first)
    """

    trees = ("best", "product", "chain", "auto")
    k: int = 0
    depth: int = 0
    frontier: int = 12
    threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth:
            self.depth_for(self.depth, "streams")

    def streams(self, gamma: int, nodes: int | None = None) -> int:
        """The number of an adapter's ``gamma`` streams that a tree of ``nodes`` nodes uses (None: ``self.size``)."""
        if self.depth or self.kind != "best":
            return self.depth_for(gamma, "streams")
        nodes = self.size if nodes is None else nodes
        return min(gamma, nodes - 1, -(-2 * nodes // 3))

    @property
    def width(self) -> int:
        """The number of candidate children of a node."""
        return min(self.widths[0], self.size - 1) if self.kind == "best" else self.widths[0]


@dataclass(frozen=True)
class StreamSettings(StreamTrees):
    """Settings of ``streams:...``, besides those of trees.

    condition  use the adapter's conditioning, if it has any
    copy       mix in what followed earlier matches in the text (greedy rows, best-first trees, native kernels)
    prune      number of nodes that the early-exit layer keeps; 0: all
    prune_threshold  minimum early-exit probability of a node given its parent, its transition score; 0: none
    placement  ride in the target's pass (the paper), trail it, or auto: trail on a CPU and with an adapter that
               conditions its streams on the emitted token, otherwise ride
    """

    condition: bool = True
    copy: bool = False
    prune: int = 0
    prune_threshold: float = 0.0
    placement: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prune_threshold < 1:
            raise InputError(f"prune_threshold must be a probability below 1, got {self.prune_threshold}")

    @classmethod
    def in_auto(cls) -> StreamSettings:
        """``tree=auto,copy=yes``."""
        return cls(tree="auto", copy=True)

    @property
    def additions(self) -> Mapping[str, bool]:
        """``copy``, if it is on."""
        return {"copy": True} if self.copy else {}


class StreamDraft:
    """Builds trees for one target and adapter."""

    def __init__(self, target: Decoder, adapter: StreamModule, settings: StreamSettings | None = None) -> None:
        self.settings = settings or StreamSettings()
        self.target, self.adapter = target, adapter
        self.depth = self.settings.streams(adapter.shape.num_streams)
        self.graphs = Graphs()
        self.conditioner = adapter.conditioner if self.settings.condition else None
        self.head = adapter.shared(target, DraftHead, lambda: DraftHead(target, adapter.vocabulary))
        if self.conditioner is not None:
            self.conditioner.pack(target.head)

    @cached_property
    def native(self) -> NativeDraft | None:
        """The builder on the native kernels, if they support it; created on first use, since training needs none."""
        given = self.target, self.head, self.settings, self.conditioner
        if not NativeDraft.fits(*given):
            return None
        return NativeDraft(*given, depth=self.depth, predictor=self.adapter.predictor)

    def condition(self, states: Tensor, tokens: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A stream's states [B, 1, D] conditioned on parent tokens [B, F]: [B, F, D], or unchanged."""
        if self.conditioner is None:
            return states, None
        return self.conditioner(states, self.target.embedding(tokens), carried)  # type: ignore[no-any-return]

    def row(self) -> RowVocabulary:
        """The own tokens of a new row."""
        return RowVocabulary(self.head)

    # -- deterministic trees ------------------------------------------------------------------------
    def build(
        self,
        states_BSD: Tensor | Sequence[Tensor],
        roots: list[int],
        rows: Sequence[RowVocabulary] | None = None,
        noise: Sequence[DrawNoise | None] | None = None,
        ahead: Sequence[Sequence[int]] | None = None,
    ) -> list[DraftTree]:
        """One tree per row from stream states after the last norm [B, S, D] and the rows' root tokens.

        rows   add each row's own tokens to the draft vocabulary, and know its text
        noise  of the rows that are sampled
        ahead  the tokens after each row's text that end with its root; None: every text ends with the root
        """
        noise = [None] * len(roots) if noise is None else noise
        if self.native is not None:
            own = [None] * len(roots) if rows is None else rows
            return list(map(self.native, states_BSD, roots, own, noise, ahead or [()] * len(roots)))
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
        words, drawn = self.head.words(rows, len(roots)), DrawNoise.together(noise, self.depth)
        levels = self._captured(states_BSD, torch.tensor(roots), words, drawn)
        best = self.settings.kind == "best"
        budget, floor = (self.settings.size, self.settings.floor) if best else (None, -math.inf)
        return trees_of(roots, levels, self.adapter.predictor, budget, floor)

    def _captured(self, states_BSD: Tensor, roots_B: Tensor, words: Words, drawn: Drawn | None) -> list[Level]:
        """``_grow``, captured as a graph where the backend captures them."""
        own = () if words.own_BXD is None or words.offset_B1X is None else (words.own_BXD, words.offset_B1X)

        def compute(states_BSD: Tensor, roots_B: Tensor, ids_BV: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
            row_words = replace(words, ids_BV=ids_BV)
            if own:
                row_words.own_BXD, row_words.offset_B1X = more[: len(own)]
            levels = self._grow(states_BSD, roots_B, row_words, Drawn(*more[len(own) :]) if drawn is not None else None)
            return tuple(part for level in levels for part in (level.tokens, level.joint, level.parents))

        key = (words.ids_BV.shape, drawn is not None)
        inputs = (states_BSD, roots_B, words.ids_BV, *own, *(drawn or ()))
        results = self.graphs.run(self.target.backend.capture, key, compute, inputs, states_BSD.device)
        return [Level(*results[i : i + 3]) for i in range(0, len(results), 3)]

    def _grow(self, states_BSD: Tensor, roots_B: Tensor, words: Words, drawn: Drawn | None) -> list[Level]:
        settings, ids = self.settings, words.ids_BV
        carried: Tensor | None = None

        def best(states: Tensor, levels: slice) -> tuple[Tensor, Tensor]:
            scores = self.head.logits(states, words)
            if drawn is not None:
                scores = drawn.added(scores, ids, levels)
            log_probs, places = self.head.best(scores, min(settings.width, ids.shape[1]))
            return ids.gather(1, places.flatten(1)).view_as(places), log_probs

        # without conditioning, all nodes of a level have the same children
        every = best(states_BSD[:, : self.depth], slice(0, self.depth)) if self.conditioner is None else None

        def expand(d: int, tokens_BF: Tensor, above_BF: Tensor | None) -> tuple[Tensor, Tensor]:
            nonlocal carried
            if every is not None:
                children, log_probs = (x[:, d : d + 1] for x in every)
                each = (*tokens_BF.shape, log_probs.shape[-1])
                return children.expand(each), log_probs.expand(each)
            if carried is not None and above_BF is not None:
                carried = carried.gather(1, above_BF[:, :, None].expand(-1, -1, carried.shape[-1]))
            states, carried = self.condition(states_BSD[:, d : d + 1], tokens_BF, carried)
            return best(states, slice(d, d + 1))

        return grow_tensors(
            roots_B,
            expand,
            depth=self.depth,
            budget=settings.size if settings.kind == "best" else None,
            frontier=settings.frontier,
            lazy=states_BSD.device.type == "cpu" and self.target.backend.capture is None,
        )

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
        k = self.settings.width
        carried: Tensor | None = None
        words = self.head.words(None if row is None else [row], 1)
        uniforms = _Siblings()

        def distributions(nodes: list[Node]) -> Tensor:
            nonlocal carried
            if carried is not None:
                parents = torch.tensor([node.parent.state for node in nodes if node.parent])
                carried = carried[:, parents.to(carried.device)]
            for place, node in enumerate(nodes):
                node.state = place
            d, above = nodes[0].depth, torch.tensor([[node.token for node in nodes]], device=states_SD.device)
            states, carried = self.condition(states_SD[None, d : d + 1], above, carried)
            scores = torch.full((len(nodes), self.target.config.vocab_size), -math.inf, device=states_SD.device)
            scores[:, words.ids_BV[0]] = self.head.logits(states, words)[0].expand(len(nodes), -1)
            uniforms.values = noise.random((k, len(nodes))).T
            return target_probs(scores, params)

        depth = min(self.depth, depth)
        growth = Growth(root, Form(product_size((k,), depth), depth, (k,), noise=uniforms))
        (tree,) = grow([growth], distributions, by_depth(self.adapter.predictor))
        return tree


class _Siblings:
    """The numbers that the children of a level's nodes are drawn with, drawn child by child for all nodes."""

    values: NDArray[np.float64]

    def random(self, size: int, /) -> NDArray[np.float64]:
        """The numbers of the next node."""
        numbers, self.values = self.values[0], self.values[1:]
        assert len(numbers) == size, "all nodes of a level have as many children"
        return np.asarray(numbers)


class NativeDraft:
    """Builds the tree of one row with the native kernels: conditioning, scoring and selection in one call.

    depth      states that a tree is built from
    predictor  what one of them is called in sources
    certainty  what scores (of sampled rows with their noise) are multiplied by to give the logits of acceptance
               probabilities; None: ``CONFIDENCE`` for sampled rows, 1 for others
    """

    def __init__(
        self,
        target: Decoder,
        head: DraftHead,
        settings: StreamSettings,
        conditioner: Conditioner | None = None,
        *,
        depth: int,
        predictor: str = "stream",
        certainty: float | None = None,
    ) -> None:
        assert isinstance(head.scores, NativeLinear), "the kernels have these scores"
        self._greedy, self._sampled = (1.0, CONFIDENCE) if certainty is None else (certainty, certainty)
        chain = settings.kind == "chain"
        self._kernels = StreamKernels(head.scores.kernels)
        self._sources = ("target", *(f"{predictor} {d}" for d in range(1, depth + 1)), COPIED)
        self.copies, self._copy_weight = settings.copy and settings.kind == "best", COPY_STEPS
        vocabulary = head.vocabulary
        terms = {} if conditioner is None else conditioner.packed
        linears = {name: linear for name, linear in terms.items() if isinstance(linear, NativeLinear)}
        self._kept = (linears, head, vocabulary, target.embedding)
        self._config = DraftConfig(
            embedding=table_of(target),
            head=head.scores.packed,
            ids=vocabulary.data_ptr(),
            d=target.config.hidden_size,
            depth=depth,
            children=min(settings.width, len(vocabulary)),
            nodes=depth + 1 if chain else settings.size,
            frontier=1 if chain else settings.frontier,
            blocks=max(BLOCKS, 4 * settings.size),
            noise_scale=self._sampled,
            min_log_prob=-math.inf if chain else settings.floor,
            mixed=MIXED,
            alone=ALONE,
            **{name: linear.packed for name, linear in linears.items()},
        )

    @staticmethod
    def fits(target: Decoder, head: DraftHead, settings: StreamSettings, conditioner: Conditioner | None) -> bool:
        """Return whether the target runs on the kernels, which know best-first trees and chains, conditioned or not."""
        width = target.config.hidden_size
        if not isinstance(head.scores, NativeLinear) or settings.kind == "product" or head.bias is not None:
            return False
        if width % BLOCK or width > native.MAX_EMBEDDING_WIDTH or target.config.logit_softcap is not None:
            return False
        if conditioner is None:
            return True
        linears = [linear for linear in conditioner.packed.values() if isinstance(linear, NativeLinear)]
        return len(linears) == 4 and conditioner.rank % BLOCK == 0

    def __call__(
        self,
        states_SD: Tensor,
        root: int,
        row: RowVocabulary | None,
        noise: DrawNoise | None,
        ahead: Sequence[int] = (),
    ) -> DraftTree:
        """The tree of one row."""
        tokens, parents, sources, log_probs = self.nodes(states_SD, root, row, noise, ahead)
        return DraftTree.unchecked(
            tokens, parents, tuple([self._sources[place] for place in sources.tolist()]), log_probs
        )

    def nodes(
        self,
        states_SD: Tensor,
        root: int,
        row: RowVocabulary | None,
        noise: DrawNoise | None,
        ahead: Sequence[int] = (),
    ) -> DraftedNodes:
        """The nodes of one row's tree."""
        keys = None if noise is None else np.ascontiguousarray(noise.keys_D)
        self._config.keys = None if keys is None else address(keys)
        self._config.score_scale = self._greedy if noise is None else self._sampled / noise.temperature
        own = None if row is None else row.head
        if isinstance(own, NativeLinear):
            assert row is not None
            self._config.row_head, self._config.row_ids = own.packed, row.ids.data_ptr()
        else:
            self._config.row_head, self._config.row_ids = structs.Packed(), None
        text = None
        if self.copies and row is not None and noise is None:
            text = row.text + array("q", ahead) if ahead else row.text
            self._weigh(round(COPY_STEPS * row.copy_weight))
        self._config.text, self._config.text_length = (None, 0) if text is None else text.buffer_info()
        return self._kernels.draft(self._config, states_SD, root)

    def _weigh(self, weight: int) -> None:
        """Multiply the weights of what is copied by ``weight`` / ``COPY_STEPS``; most drafts have the last one's."""
        if weight != self._copy_weight:
            self._copy_weight = weight
            self._config.mixed, self._config.alone = (
                tuple([weight / COPY_STEPS * each for each in table]) for table in (MIXED, ALONE)
            )
