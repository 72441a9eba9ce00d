"""Scores of draft tokens from hidden states: the target's head over a draft vocabulary.

Drafting only frequent tokens is cheaper (FR-Spec, Zhao et al. 2025) and does not affect verification. Names and numbers
of a prompt are rare in general but frequent in its answer, so a row's own tokens are added once they occur in its text.

    head = DraftHead(target, vocabulary)              shared by all drafters of the vocabulary
    row = RowVocabulary(head)                         one for each row; row.extend(text) as its text grows
    head.best_tokens(states_BFD, k, rows)             tokens and log probabilities [B, F, k]

B rows of the batch, F states of a row, V scored tokens, Vd draft vocabulary, X own tokens of a row, D model width.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.drafting.drafter import Row
from anabranch.drafting.draws import CONFIDENCE
from anabranch.model.decoder import Decoder
from anabranch.model.native_linear import NativeLinear, SelectedOutputs
from anabranch.model.pack import packed_like, read_bytes
from anabranch.sampling import MIN_TEMPERATURE, gumbels_of, halves, position_keys
from anabranch.support.memory import give_back

__all__ = ["DraftHead", "DrawNoise", "Drawn", "RowVocabulary", "Words"]

SCORES: Literal["int8"] = "int8"  # quantisation of the draft head, finer than that of other weights of drafts
OWN = 64  # in CUDA graphs the rows' own tokens are padded to a multiple of this, for few distinct shapes


class Drawn(NamedTuple):
    """The noise of several rows: halves of the positions' keys by level, temperatures, and whether a row is sampled."""

    low_BD: Tensor
    high_BD: Tensor
    temperatures_B: Tensor
    sampled_B: Tensor

    def added(self, scores_BFV: Tensor, ids_BV: Tensor, levels: slice) -> Tensor:
        """Scores with the noise of sampled rows, times the confidence in them; those of greedy rows as they are.

        levels  the levels of the F states, or one for all of them
        """
        noise_BFV = gumbels_of(self.low_BD[:, levels, None], self.high_BD[:, levels, None], ids_BV[:, None])
        noisy = (scores_BFV / self.temperatures_B[:, None, None] + noise_BFV) * CONFIDENCE
        return torch.where(self.sampled_B[:, None, None], noisy, scores_BFV)


@dataclass(frozen=True)
class DrawNoise:
    """The noise for drafting sampled tokens of a row: the temperature, and the keys of the positions by level [D].

    The target samples the argmax of logits / temperature + ``sampling.gumbels``. Drafters add the same noise to their
    scores: with the target's scores, every draft would be accepted.
    """

    temperature: float
    keys_D: NDArray[np.uint64]

    @staticmethod
    def of(row: Row, depth: int, *, ahead: int = 0) -> DrawNoise | None:
        """The noise of ``depth`` tokens, ``ahead`` tokens after a row's root; None if the row is greedy."""
        if row.sampling.greedy:
            return None
        positions = len(row.tokens) + ahead + np.arange(depth)
        return DrawNoise(max(row.sampling.temperature, MIN_TEMPERATURE), position_keys(row.sampling.seed, positions))

    @staticmethod
    def together(noise: Sequence[DrawNoise | None], depth: int, device: torch.device | None = None) -> Drawn | None:
        """The noise of several rows, for ``depth`` levels, on a device; None if no row is sampled."""
        if not any(noise):
            return None
        keys_BD = np.stack([np.zeros(depth, np.uint64) if n is None else n.keys_D[:depth] for n in noise])
        temperatures_B = torch.tensor([1.0 if n is None else n.temperature for n in noise])
        sampled_B = torch.tensor([n is not None for n in noise])
        return Drawn(*(x.to(device) for x in (*halves(keys_BD), temperatures_B, sampled_B)))


@dataclass
class Words:
    """The tokens that a batch of rows is scored over, and the rows' own part of the head, padded [B, X, D]."""

    ids_BV: Tensor
    own_BXD: Tensor | None = None
    offset_B1X: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None  # if there is only one row


class DraftHead:
    """The target's head over a draft vocabulary; one object for all drafters of the two, since packed copies take MBs.

    vocabulary  [Vd] token ids on the target's device; ``common`` has the same ids
    bias        [all tokens] of the full head, if it has one
    read        bytes of weights that scoring reads
    scores      states [..., D] -> scores of the draft vocabulary [..., Vd], without the target's soft cap: int8 weights
                where the target runs on native kernels, otherwise packed or PyTorch's like the target's head
    """

    def __init__(
        self, target: Decoder, vocabulary: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """``weight`` [Vd, D] replaces the target's own rows of the head, and ``bias`` [Vd] those of its bias."""
        self.target = target
        self.vocabulary = vocabulary.to(target.device)
        self.common = frozenset(self.vocabulary.tolist())
        self.bias: Tensor | None = target.head.bias
        self.scores: Callable[[Tensor], Tensor]
        self.weight: Tensor | None = None  # that of ``scores``, if they are its product and nothing else
        # a contiguous copy of the frequent tokens' head rows: reading them dominates the cost of a draft
        if weight is None and (shared := _stored_rows(target.head, vocabulary)) is not None:
            self.scores, self.read = shared, read_bytes([shared])
            return
        if weight is None:
            whole = len(self.vocabulary) == target.config.vocab_size
            unpacked = whole and target.backend.kernels is None and target.head.weight is not None
            weight = target.head.weight if unpacked else target.head_rows(self.vocabulary)
        if bias is None and self.bias is not None:
            bias = self.bias[self.vocabulary]
        packed = packed_like(target.head, weight, bias, SCORES)
        self.scores = packed or partial(F.linear, weight=weight, bias=bias)
        self.weight = weight if packed is None and bias is None else None
        self.read = weight.nbytes if packed is None else read_bytes([packed])
        del weight
        give_back()

    def words(self, rows: Sequence[RowVocabulary] | None, count: int) -> Words:
        """The draft vocabulary of ``count`` rows, with the rows' own tokens."""
        ids = self.vocabulary.expand(count, -1)
        widest = max((len(row.ids) for row in rows or ()), default=0)
        if self.target.backend.capture is not None:
            widest = -(-max(widest, 1) // OWN) * OWN  # few shapes
        if rows is None or widest == 0:
            return Words(ids)
        if count == 1 and rows[0].head is not None:
            return Words(torch.cat((ids, rows[0].ids[None]), dim=1), head=rows[0].head)
        own_ids = torch.zeros(count, widest, dtype=torch.long, device=ids.device)
        width = self.target.config.hidden_size
        own = torch.zeros(count, widest, width, dtype=self.target.dtype, device=ids.device)
        offset = torch.full((count, 1, widest), float("-inf"), device=ids.device)
        for b, row in enumerate(rows):
            n = len(row.ids)
            own_ids[b, :n], own[b, :n] = row.ids, row.head_XD
            offset[b, 0, :n] = 0.0 if row.bias_X is None else row.bias_X.float()
        return Words(torch.cat((ids, own_ids), dim=1), own, offset)

    def logits(self, states_BFD: Tensor, words: Words) -> Tensor:
        """Scores over the draft vocabulary and the rows' own tokens [B, F, V], float32."""
        # PyTorch on a CPU copies the weights once for each row of states that are not adjacent in memory
        z = self.capped(self.scores(states_BFD.contiguous()).float())
        if words.head is not None:
            return torch.cat((z, self.capped(words.head(states_BFD).float())), dim=-1)
        if words.own_BXD is None or words.offset_B1X is None:
            return z
        own = (states_BFD.to(words.own_BXD.dtype) @ words.own_BXD.transpose(1, 2)).float() + words.offset_B1X
        # mask padding again: the soft cap makes minus infinity finite
        return torch.cat((z, self.capped(own).masked_fill(words.offset_B1X.isinf(), float("-inf"))), dim=-1)

    def capped(self, z: Tensor) -> Tensor:
        """Scores with the target's soft cap."""
        cap = self.target.config.logit_softcap
        return z if cap is None else torch.tanh(z / cap) * cap

    def best(self, scores_BFV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The log probabilities and indices [B, F, k] of the k best scores, best first.

        -inf where a state overflowed.
        """
        if isinstance(self.scores, NativeLinear):
            values, places = self.scores.kernels.best(scores_BFV.flatten(0, 1), k)
            log_probs, places = (x.view(*scores_BFV.shape[:2], k) for x in (values, places))
        else:
            log_probs, places = scores_BFV.log_softmax(-1).topk(k, dim=-1)
        return log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf), places

    def best_tokens(
        self,
        states_BFD: Tensor,
        k: int,
        rows: Sequence[RowVocabulary] | None = None,
        drawn: Drawn | None = None,
        levels: slice = slice(0, 1),
    ) -> tuple[Tensor, Tensor]:
        """The ``k`` best tokens after each state and their log probabilities, both [B, F, k], best first.

        rows    the rows' own tokens, scored too
        drawn   the noise of the rows (``DrawNoise.together``), on the device of the states
        levels  its levels for the F states, or one level for all of them
        """
        words = self.words(rows, len(states_BFD))
        scores = self.logits(states_BFD, words)
        if drawn is not None:
            scores = drawn.added(scores, words.ids_BV, levels)
        log_probs, places = self.best(scores, min(k, scores.shape[-1]))
        return words.ids_BV.gather(1, places.flatten(1)).view_as(places), log_probs


def _stored_rows(head: nn.Module, vocabulary: Tensor) -> NativeLinear | None:
    """Rows of a head in quantised blocks of its file, with its values; the head itself for the whole vocabulary.

    None for other heads, and for heads with a bias.
    """
    if not isinstance(head, NativeLinear) or head.kind != "stored" or head.offset is not None:
        return None
    if torch.equal(vocabulary, torch.arange(head.out_features)):
        return head
    rows = SelectedOutputs.of(head)
    assert rows is not None
    rows.add(vocabulary.numpy())
    return rows


class RowVocabulary:
    """The tokens of a row's text that are not in the draft vocabulary, with their rows of the target's head.

    ids      [X] token ids, in the order in which they occurred
    head_XD  their rows of the head; ``bias_X`` their part of its bias
    head     states [..., D] -> scores [..., X], packed if the target's head is and X > 0; otherwise None
    text     the whole text so far
    copy_weight  factor of the weights of what is copied from it (``streams.copying``)
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.text, self.copy_weight = array("q"), 1.0
        self._known: dict[int, None] = {}  # in the order of ``ids``
        self._selected = SelectedOutputs.of(head.target.head)
        self.ids = head.vocabulary[:0]
        self._rows_XD = head.target.head_rows(self.ids)  # of the ids for which they were asked
        self.head: Callable[[Tensor], Tensor] | None = None

    def extend(self, text: Sequence[int]) -> RowVocabulary:
        """Add the tokens of ``text`` (which only grows) that are new since the last call."""
        common, new = self._head.common, []
        more = text[len(self.text) :]
        for token in more:
            if token not in common and token not in self._known:
                self._known[token] = None
                new.append(token)
        self.text.extend(more)
        if new:
            self.ids = torch.cat((self.ids, torch.tensor(new, device=self.ids.device)))
            if self._selected is None:
                self.head = packed_like(self._head.target.head, self.head_XD, self.bias_X, SCORES)
            else:
                self._selected.add(np.array(new, np.int64))
                self.head = self._selected
        return self

    @property
    def own(self) -> list[int]:
        """The ``ids`` on the host."""
        return list(self._known)

    @property
    def head_XD(self) -> Tensor:
        """Rows of the target's head; where its outputs are selected in their packed form, most drafts need none."""
        known = len(self._rows_XD)
        if known < len(self.ids):
            self._rows_XD = torch.cat((self._rows_XD, self._head.target.head_rows(self.ids[known:])))
        return self._rows_XD

    @property
    def bias_X(self) -> Tensor | None:
        """Their part of the head's bias; None if it has none."""
        return None if self._head.bias is None else self._head.bias[self.ids]
