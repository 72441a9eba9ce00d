"""Decode both ways and explain every difference: a *tie* of the target's numerics, or a BUG.

In float32 speculative output equals plain output, greedy or with a seed. In bf16 and fp16 a wide pass rounds otherwise
than a narrow one, so two logits that are nearly equal may change places. The first token that differs is a tie if the
law there, recomputed from the common text in passes of several widths, is so close to either token that the difference
between those passes covers the distance.

The distance is that of a token's logit from the largest, and what covers it is what moves between two passes' logits;
at a temperature logits are those that are drawn from, the position's noise added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from anabranch.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.methods import make_drafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.model.cache import Cache
from anabranch.model.decoder import Inputs
from anabranch.model.load import Target
from anabranch.sampling import COLDEST, SamplingParams, gumbels, position_keys, process_logits

__all__ = ["Certificate", "certify"]

# a recomputation samples the rounding of a few pass widths; real passes have others
SLACK = 2.0
WIDTHS = (1, 2, 5, 17)


@dataclass(frozen=True)
class Certificate:
    """What came of one prompt.

    verdict  "equal", "tie" or "BUG"
    at       index of the first new token that differs; ``plain`` and ``drafted`` are the two tokens there
    margin   how far the law must move for both to be drawn: logits if greedy, else probability
    noise    how far recomputation moves it
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
    """Decode every prompt plainly and with the drafter ``spec``, and compare token by token.

    ``report`` is told of each prompt as it is done. Raises what ``make_drafter`` and ``Engine.check`` raise, before
    anything is decoded.
    """
    if not prompts:
        raise InputError("there is nothing to certify; give at least one prompt")
    sampling = sampling or SamplingParams()
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens
    engines = [
        Engine(target.decoder, make_drafter(name, target.decoder, adapter), capacity=capacity)
        for name in ("none", spec)
    ]
    stop = frozenset(target.config.eos_token_ids)
    for engine in engines:
        for prompt in prompts:
            engine.check(Request(prompt, max_new_tokens, sampling, stop))
    found = []
    for index, prompt in enumerate(prompts):
        request = Request(prompt, max_new_tokens, sampling, stop)
        plain, drafted = (_decode(engine, request) for engine in engines)
        found.append(_compare(target, index, request, plain, drafted))
        report(found[-1])
    return found


def _decode(engine: Engine, request: Request) -> list[int]:
    engine.add(request)
    return [token for step in engine.run() for token in step.tokens]


def _compare(target: Target, index: int, request: Request, plain: list[int], drafted: list[int]) -> Certificate:
    if plain == drafted:
        return Certificate(index, "equal", len(plain))
    shorter = min(len(plain), len(drafted))
    at = next((i for i in range(shorter) if plain[i] != drafted[i]), shorter)
    if at == shorter:
        # same tokens, one output longer: neither end tokens nor limits may depend on the drafter
        return Certificate(index, "BUG", len(plain), at)
    text = [*request.prompt_ids, *plain[:at]]
    margin, noise = _margin(target, text, (plain[at], drafted[at]), request.sampling)
    verdict: Literal["tie", "BUG"] = "tie" if margin <= SLACK * noise else "BUG"
    return Certificate(index, verdict, len(plain), at, plain[at], drafted[at], round(margin, 6), round(noise, 6))


@torch.inference_mode()
def _margin(target: Target, text: list[int], tokens: tuple[int, int], sampling: SamplingParams) -> tuple[float, float]:
    """How far the law after ``text`` must move for both tokens to be drawn, and how far a pass's width moves it."""
    passes = [_logits(target, text, width) for width in WIDTHS if width <= len(text)]
    scores = [process_logits(logits[None], sampling, [text])[0] for logits in passes]
    # one rounding step of the largest logit, at least
    floor = torch.finfo(target.decoder.dtype).eps * float(passes[0].abs().max())
    if not sampling.greedy:
        keys = position_keys(sampling.seed, [len(text)])
        noise_V = gumbels(keys, torch.arange(len(scores[0]), device=scores[0].device))[0]
        scores = [score + noise_V for score in scores]
        floor /= max(sampling.temperature, COLDEST)
    curves = [score.max() - score for score in scores]
    needed = [max(float(curve[token]) for token in tokens) for curve in curves]
    # what is far below the top moves more and does not matter
    top = scores[0].topk(min(8, len(scores[0]))).indices
    where = torch.unique(torch.cat((top, torch.tensor(tokens, device=top.device))))
    # a token that one pass cuts off and another does not has moved without end; one that all cut off, not at all
    moved = [torch.nan_to_num((curve - curves[0])[where].abs(), nan=0.0, posinf=math.inf) for curve in curves]
    return min(needed), max(floor, *(float(each.max()) for each in moved))


def _logits(target: Target, text: list[int], width: int) -> Tensor:
    """Float32 logits after ``text``, whose last ``width`` tokens go through one pass."""
    decoder = target.decoder
    cache = Cache(target.config, rows=1, capacity=len(text), dtype=decoder.dtype, device=decoder.device)
    cache.add_row()
    head = text[: len(text) - width]
    if head:
        decoder(Inputs.of_prompt(head), cache, need="hidden", planned=len(text))
        cache.commit([range(len(head))])
    logits = decoder(Inputs.of_prompt(text[len(head) :]), cache, planned=len(text)).logits_BNV
    assert logits is not None
    last: Tensor = logits[0, -1].float()
    return last
