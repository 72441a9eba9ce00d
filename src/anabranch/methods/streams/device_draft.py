"""Best-first trees that a GPU grows from stream states and verifies before the host has seen them.

The same trees as ``StreamDraft`` builds, in the fused operations of ``device.draft_ops``. The host sends roots and the
rows' own tokens, and reads the trees together with what the target accepted of them.

B rows of the batch, F frontier nodes, S streams, T candidates, X own tokens of a row, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.drafting.head import OWN, RowVocabulary
from anabranch.methods.streams.draft import StreamDraft
from anabranch.model.device import draft_ops  # noqa: F401 - defines operations
from anabranch.model.device.layers import NO_NORM, trusted
from anabranch.model.device.ops import ACTIVATIONS, ops
from anabranch.model.graphs import width_bucket
from anabranch.model.inputs import DeviceTrees

__all__ = ["DeviceDraft"]

MOST_ROWS = 8  # the scores of more frontiers are products that cuBLAS computes faster
MOST_NODES = 64  # a level is sorted by one program


class DeviceDraft:
    """Grows the trees of one ``StreamDraft``."""

    def __init__(self, draft: StreamDraft) -> None:
        conditioner = draft.conditioner
        assert conditioner is not None
        self.draft, self.path = draft, conditioner.kind == "path"
        parts = [conditioner.token, conditioner.state, conditioner.carry] if self.path else [conditioner.token]
        self._inputs = torch.cat([part for part in parts if part is not None], dim=1)
        self._to_state, self._rank = conditioner.to_state, conditioner.rank

    @staticmethod
    def of(draft: StreamDraft) -> DeviceDraft | None:
        """None where the host builds these trees."""
        target, settings = draft.target, draft.settings
        fits = (
            (target.backend.verifies and trusted(target.device) and draft.conditioner is not None)
            and (settings.kind == "best" and 2 <= settings.size <= MOST_NODES)
            and (draft.head.weight is not None and target.config.logit_softcap is None)
        )
        return DeviceDraft(draft) if fits else None

    def __call__(
        self,
        states: Sequence[Tensor],
        roots: Sequence[int],
        lengths: Sequence[int],
        words: Sequence[RowVocabulary],
    ) -> DeviceTrees | None:
        """The trees of rows with stream states [S, D] each; None if there are too many."""
        rows, nodes = len(roots), self.draft.settings.size
        width = width_bucket(nodes, rows)
        if rows > MOST_ROWS or width is None:
            return None
        own = [each.own for each in words]
        widest = -(-max(1, *map(len, own)) // OWN) * OWN
        ids = [each + [0] * (widest - len(each)) for each in own]
        numbers = torch.tensor([*roots, *lengths, *map(len, own), *(token for each in ids for token in each)])
        states_BSD = states[0][None] if rows == 1 else torch.stack(list(states))

        def compute(states_BSD: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
            return self._grow(states_BSD, numbers, rows, width)

        capture, device = self.draft.target.backend.capture, states_BSD.device
        key = ("device", rows, widest, states_BSD.shape)
        packed, _ = self.draft.graphs.run(capture, key, compute, (states_BSD, numbers), device)
        return DeviceTrees(packed, rows, width, self.draft.adapter.predictor)

    def _grow(self, states_BSD: Tensor, numbers: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """The trees, and the joint log probabilities of all candidates, by which a captured graph is checked."""
        draft, head = self.draft, self.draft.head
        assert head.weight is not None
        settings, b = draft.settings, rows
        roots_B, lengths_B, counts_B = numbers[: 3 * b].view(3, b)
        ids_BX = numbers[3 * b :].view(b, -1)
        most, children = settings.size - 1, min(settings.width, len(head.vocabulary) + ids_BX.shape[1])
        counts, frontiers, above = [], [1], 1
        for _ in range(draft.depth):
            counts.append(min(above * children, most))
            above = min(settings.frontier, counts[-1])
            frontiers.append(above)
        starts = [sum(counts[:d]) for d in range(draft.depth)]
        shape = (b, sum(counts))
        tokens_BT, parents_BT = (torch.empty(shape, dtype=torch.int64, device=numbers.device) for _ in range(2))
        joint_BT = torch.empty(shape, dtype=torch.float32, device=numbers.device)
        carried: Tensor | None = None
        frontier, parents = roots_B[:, None], roots_B[:, None]
        for d, (start, count) in enumerate(zip(starts, counts, strict=True)):
            at = starts[d - 1] if d else -1
            first = starts[d - 2] if d > 1 else -1
            hidden, z = self._conditioned(states_BSD, d, frontier, carried, parents, first)
            scores = ops.product(hidden, head.weight, None, *NO_NORM, 0, 0, None)
            own = ops.own_scores(hidden, draft.target.head.weight, ids_BX, counts_B)
            best = ops.best(scores, own, head.vocabulary, ids_BX, children)
            ops.level(*best, frontiers[d], at, start, count, tokens_BT, joint_BT, parents_BT)
            following = slice(start, start + frontiers[d + 1])
            frontier, parents, carried = tokens_BT[:, following], parents_BT[:, following], z
        tree: Tensor = ops.select(
            tokens_BT, joint_BT, parents_BT, roots_B, lengths_B, settings.size, width, settings.floor
        )
        return tree, joint_BT

    def _conditioned(
        self, states_BSD: Tensor, d: int, tokens_BF: Tensor, carried: Tensor | None, parents_BF: Tensor, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """States of stream ``d`` conditioned on the frontier's tokens [B F, D], and what their children carry on."""
        embedding, width = self.draft.target.embedding.weight, states_BSD.shape[2]
        x = ops.condition(embedding, tokens_BF, states_BSD, d, self.path, carried, parents_BF, first, self._rank)
        activation = ACTIVATIONS.index("silu" if self.path else "none")
        z = ops.product(x, self._inputs, None, *NO_NORM, activation, 0, None)
        state = x[:, width : 2 * width]
        if not self.path:
            state = states_BSD[:, d : d + 1].expand(-1, tokens_BF.shape[1], -1).flatten(0, 1)
        return ops.product(z, self._to_state, None, *NO_NORM, 0, 0, state), z if self.path else None
