"""Decode both ways and explain every difference: a *tie* of the target's numerics, or a BUG.

In float32 speculative greedy output equals plain greedy output. In bf16 and fp16 a wide pass rounds otherwise than a
narrow one, so two logits that are nearly equal may change places. The first token that differs is a tie if, with both
continuations' logits recomputed at that place in one narrow pass, the two tokens are no further apart than
recomputing the same place in passes of other widths moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from anabranch.drafters import make_drafter
from anabranch.engine import Engine, Request
from anabranch.model.cache import Cache
from anabranch.model.decoder import Feed
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams
from anabranch.streams.adapter import StreamAdapter

__all__ = ["Certificate", "certify"]

# a recomputation samples the rounding of a few pass widths; real passes have others
SLACK = 2.0
WIDTHS = (1, 2, 5, 17)


@dataclass(frozen=True)
class Certificate:
    """What came of one prompt.

    verdict  "equal", "tie" or "BUG"
    at       index of the first new token that differs; ``plain`` and ``drafted`` are the two tokens there
    margin   how far their logits are apart; ``noise`` how far recomputation moves that distance
    """

    prompt: int
    verdict: Literal["equal", "tie", "BUG"]
    tokens: int
    at: int | None = None
    plain: int | None = None
    drafted: int | None = None
    margin: float | None = None
    noise: float | None = None


def certify(
    target: Target,
    adapter: StreamAdapter | None,
    spec: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    report: Callable[[Certificate], None] = lambda found: None,
) -> list[Certificate]:
    """Decode every prompt plainly and with the drafter ``spec``, and compare token by token."""
    sampling = sampling or SamplingParams()
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens
    engines = [
        Engine(target.decoder, make_drafter(name, target.decoder, adapter), capacity=capacity)
        for name in ("none", spec)
    ]
    stop = frozenset(target.config.eos_token_ids)
    found = []
    for index, prompt in enumerate(prompts):
        outputs = []
        for engine in engines:
            engine.add(Request(prompt, max_new_tokens, sampling, stop))
            outputs.append([token for step in engine.run() for token in step.tokens])
        found.append(_compare(target, index, list(prompt), *outputs))
        report(found[-1])
    return found


def _compare(target: Target, index: int, prompt: list[int], plain: list[int], drafted: list[int]) -> Certificate:
    if plain == drafted:
        return Certificate(index, "equal", len(plain))
    shorter = min(len(plain), len(drafted))
    at = next((i for i in range(shorter) if plain[i] != drafted[i]), shorter)
    if at == shorter:
        # same tokens, one output longer: neither end tokens nor limits may depend on the drafter
        return Certificate(index, "BUG", len(plain), at)
    margin, noise = _margin(target, [*prompt, *plain[:at]], plain[at], drafted[at])
    verdict: Literal["tie", "BUG"] = "tie" if margin <= SLACK * noise else "BUG"
    return Certificate(index, verdict, len(plain), at, plain[at], drafted[at], round(margin, 5), round(noise, 5))


@torch.inference_mode()
def _margin(target: Target, text: list[int], first: int, second: int) -> tuple[float, float]:
    """Distance of two tokens' logits after ``text``, and how much that distance moves with the width of the pass."""
    distances: list[float] = []
    for width in WIDTHS:
        if width > len(text):
            break
        logits = _logits(target, text, width)
        distances.append(float(logits[first] - logits[second]))
    spread = max(distances) - min(distances)
    # at least one rounding step of a logit of that size
    step = torch.finfo(target.decoder.dtype).eps * float(logits[[first, second]].abs().max())
    return min(abs(d) for d in distances), max(spread, step)


def _logits(target: Target, text: list[int], width: int) -> Tensor:
    """Float32 logits after ``text``, whose last ``width`` tokens go through one pass."""
    decoder = target.decoder
    cache = Cache(target.config, rows=1, capacity=len(text), dtype=decoder.dtype, device=decoder.device)
    cache.add_row()
    head = text[: len(text) - width]
    if head:
        decoder(Feed.of_prompt(head), cache, need_logits=False, planned=len(text))
        cache.commit([range(len(head))])
    logits = decoder(Feed.of_prompt(text[len(head) :]), cache, planned=len(text)).logits_BNV
    assert logits is not None
    last: Tensor = logits[0, -1].float()
    return last
