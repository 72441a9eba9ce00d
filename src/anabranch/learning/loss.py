"""Cross-entropy over a draft vocabulary, computed in chunks.

M predictions, m of them at a time, D model width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.model.decoder import Decoder

__all__ = ["Vocabulary", "distillation_loss", "distributions", "hits", "vocabulary_loss"]

CHUNK = 256  # predictions scored at once: 256 x 8,192 float32 are 8 MiB


@dataclass(frozen=True)
class Vocabulary:
    """A batch's draft vocabulary: rows of the head [V, D], their bias [V], and the row of each token id (or -1)."""

    head_VD: Tensor
    bias_V: Tensor | None
    place: Tensor

    @staticmethod
    def of(target: Decoder, *tokens: Tensor) -> Vocabulary:
        """The rows of the target's head for all token ids that occur in ``tokens``."""
        device = target.device
        ids = torch.unique(torch.cat([part.to(device).flatten() for part in tokens]))
        place = torch.full((target.config.vocab_size,), -1, device=device)
        place[ids] = torch.arange(len(ids), device=device)
        bias = None if target.head.bias is None else target.head.bias[ids]
        return Vocabulary(target.head_rows(ids), bias, place)


def _cross_entropy(
    z_mV: Tensor, tokens_m: Tensor, soft: float, teacher_mV: Tensor | None, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [m] of logits, the gradient of each in its logits [m, V], and which predictions are right [m]."""
    tokens_m1, slope = tokens_m[:, None], None
    if cap is not None:
        z_mV = torch.tanh(z_mV / cap)
        slope = 1 - z_mV * z_mV
        z_mV = z_mV * cap
    best_m1 = z_mV.argmax(-1, keepdim=True)
    g_mV = z_mV.softmax(-1)
    # the log of the sum of exp(z), from the largest z, whose probability is at least 1 / V
    whole_m = (z_mV.gather(1, best_m1) - g_mV.gather(1, best_m1).log())[:, 0]
    loss_m = whole_m - (1 - soft) * z_mV.gather(1, tokens_m1)[:, 0]
    g_mV.scatter_add_(1, tokens_m1, torch.full_like(z_mV[:, :1], soft - 1))
    if teacher_mV is not None:
        loss_m = loss_m - soft * torch.linalg.vecdot(teacher_mV, z_mV)
        g_mV.sub_(teacher_mV, alpha=soft)
    if slope is not None:
        g_mV.mul_(slope)
    return loss_m, g_mV, (best_m1 == tokens_m1)[:, 0]


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients were computed together with it, so that nothing of size M x V is stored.

    On a CPU this is several times faster than autograd on all logits.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        """The loss; ``gradients`` are those in ``inputs``."""
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """The gradients, scaled."""
        return None, None, *(gradient * upstream[0] for gradient in ctx.saved_tensors)


def _differentiable(loss: Tensor, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
    made: Tensor = _WithGradients.apply(loss, gradients, *inputs)  # type: ignore[no-untyped-call]
    return made


def vocabulary_loss(
    words: Vocabulary,
    states_MD: Tensor,
    tokens_M: Tensor,
    weight_M: Tensor,
    teacher_MD: Tensor | None = None,
    soft: float = 0.0,
    cap: float | None = None,
    taught_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of trained states, and which predictions are right [M], in chunks that fit the processor's caches.

    Loss = sum of weight * ((1 - soft) * CE(token) + soft * CE(target's distribution)).

    tokens_M    rows of ``words``
    teacher_MD  the target's states whose distributions are distilled; None: tokens only
    cap         soft cap of the logits
    taught_M    the row of ``teacher_MD`` for each prediction, if several share one; None: its own
    """
    total = torch.zeros((), device=states_MD.device)
    right = torch.empty(len(tokens_M), dtype=torch.bool, device=states_MD.device)
    gradient, head_VD = torch.empty_like(states_MD), words.head_VD
    with torch.no_grad(), torch.autocast(states_MD.device.type, enabled=False):
        for first in range(0, len(tokens_M), CHUNK):
            part = slice(first, first + CHUNK)
            z_mV = F.linear(states_MD[part].to(head_VD.dtype), head_VD, words.bias_V).float()
            teacher = (
                _distributions(words, teacher_MD, taught_M, part, cap) if soft and teacher_MD is not None else None
            )
            loss_m, g_mV, right[part] = _cross_entropy(z_mV, tokens_M[part], soft, teacher, cap)
            total += (loss_m * weight_M[part]).sum()
            gradient[part] = ((g_mV.to(head_VD.dtype) @ head_VD) * weight_M[part, None]).to(gradient.dtype)
    return _differentiable(total, [gradient], states_MD), right


def _distributions(
    words: Vocabulary, teacher_MD: Tensor, taught_M: Tensor | None, part: slice, cap: float | None
) -> Tensor:
    """The target's distributions for a part of the predictions; those that several share are computed once."""
    states, each = teacher_MD[part], None
    if taught_M is not None:
        rows, each = torch.unique(taught_M[part], return_inverse=True)
        states = teacher_MD[rows]
    probs = distributions(F.linear(states, words.head_VD, words.bias_V), cap)
    return probs if each is None else probs[each]


def distributions(z: Tensor, cap: float | None) -> Tensor:
    """Distributions from logits before the soft cap [..., V]."""
    z = z.float()
    return (z if cap is None else torch.tanh(z / cap) * cap).softmax(-1)


def distillation_loss(
    states_MD: Tensor,
    head_VD: Tensor,
    tokens_M: Tensor,
    teacher: Callable[[slice], Tensor],
    soft: float,
    bias_V: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of trained states and a trained head, in chunks, and which predictions are right [M].

    Loss = sum of (1 - soft) * CE(token) + soft * CE(teacher). Under autocast, products are computed in its type.

    teacher  (predictions) -> the distributions that they are to imitate [m, V], computed without gradients
    bias_V   of the head, not trained
    cap      soft cap of the logits
    """
    total = torch.zeros((), device=states_MD.device)
    right = torch.empty(len(tokens_M), dtype=torch.bool, device=states_MD.device)
    device = states_MD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    with torch.no_grad(), torch.autocast(device, enabled=False):
        states, head = states_MD.to(dtype), head_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        to_states, to_head = torch.empty_like(states), torch.zeros_like(head, dtype=torch.float32)
        for first in range(0, len(tokens_M), CHUNK):
            part = slice(first, first + CHUNK)
            z_mV = F.linear(states[part], head, bias).float()
            loss_m, g_mV, right[part] = _cross_entropy(z_mV, tokens_M[part], soft, teacher(part) if soft else None, cap)
            total += loss_m.sum()
            g_mV = g_mV.to(dtype)
            to_states[part] = g_mV @ head
            to_head += g_mV.T @ states[part]
    gradients = to_states.to(states_MD.dtype), to_head.to(head_VD.dtype)
    return _differentiable(total, gradients, states_MD, head_VD), right


def hits(words: Vocabulary, states_MD: Tensor, tokens_M: Tensor, top: int) -> tuple[int, int]:
    """Count the tokens (rows of ``words``) with the highest score, and those with one of the ``top`` highest."""
    first = among = 0
    for start in range(0, len(tokens_M), CHUNK):
        part = slice(start, start + CHUNK)
        # a soft cap does not change the order of the logits, so ranks do not need it
        scores = F.linear(states_MD[part].to(words.head_VD.dtype), words.head_VD, words.bias_V)
        hit = scores.topk(top, dim=-1).indices == tokens_M[part, None]
        first += int(hit[:, 0].sum())
        among += int(hit.any(-1).sum())
    return first, among
