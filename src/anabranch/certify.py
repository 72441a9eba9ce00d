"""Compare speculative with plain decoding, and classify every difference as a rounding *tie* or a BUG.

In float32, speculative output equals plain output, greedy or with a seed. In bf16 and fp16, passes of different widths
round differently, so two nearly equal logits may swap ranks. To classify the first token that differs, its logits are
recomputed from the common text in passes of several widths. It is a tie if the logits vary between these passes by at
least the margin, the change needed for either token to be chosen.

The margin is the difference between a token's logit and the largest one. At a temperature above 0 the logits are those
after temperature and truncation, with the position's noise added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from anabranch.engine import Engine, Request
from anabranch.errors import InputError
from anabranch.methods import Spec, make_drafter
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target
from anabranch.sampling import MIN_TEMPERATURE, SamplingParams, gumbels, position_keys, process_logits

__all__ = ["Certificate", "certify"]

# tolerance, since recomputation covers only a few of the widths that decoding uses
SLACK = 2.0
WIDTHS = (1, 2, 5, 17)


@dataclass(frozen=True)
class Certificate:
    """The result for one prompt.

    verdict         "equal", "tie" or "BUG"
    tokens          new tokens of plain decoding
    at              index of the first new token that differs
    plain, drafted  the two tokens there
    margin          the change of logits needed for both tokens to be chosen
    noise           the variation of logits between recomputations
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
    modules: Sequence[nn.Module | None],
    spec: str | Spec,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    report: Callable[[Certificate], None] = lambda found: None,
) -> list[Certificate]:
    """Decode every prompt plainly and with the drafter ``spec``, and compare the tokens.

    modules  the modules trained for the target, as for ``make_drafter``
    report   called with each prompt's result

    Raises what ``make_drafter`` and ``Engine.check`` raise, before anything is decoded.
    """
    if not prompts:
        raise InputError("there is nothing to certify; give at least one prompt")
    sampling = sampling or SamplingParams()
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens
    engines = [
        Engine(target.decoder, make_drafter(name, target.decoder, *modules), capacity=capacity)
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
        # one output is a prefix of the other, but neither end tokens nor limits may depend on the drafter
        return Certificate(index, "BUG", len(plain), at)
    text = [*request.prompt_ids, *plain[:at]]
    margin, noise = _margin(target, text, (plain[at], drafted[at]), request.sampling)
    verdict: Literal["tie", "BUG"] = "tie" if margin <= SLACK * noise else "BUG"
    return Certificate(index, verdict, len(plain), at, plain[at], drafted[at], round(margin, 6), round(noise, 6))


@torch.inference_mode()
def _margin(target: Target, text: list[int], tokens: tuple[int, int], sampling: SamplingParams) -> tuple[float, float]:
    """The margin of two tokens after ``text``, and the variation of the logits between pass widths."""
    passes = [_logits(target, text, width) for width in WIDTHS if width <= len(text)]
    scores = [process_logits(logits[None], sampling, [text])[0] for logits in passes]
    # at least one rounding step of the largest logit
    floor = torch.finfo(target.decoder.dtype).eps * float(passes[0].abs().max())
    if not sampling.greedy:
        keys = position_keys(sampling.seed, [len(text)])
        noise_V = gumbels(keys, torch.arange(len(scores[0]), device=scores[0].device))[0]
        scores = [score + noise_V for score in scores]
        floor /= max(sampling.temperature, MIN_TEMPERATURE)
    curves = [score.max() - score for score in scores]
    needed = [max(float(curve[token]) for token in tokens) for curve in curves]
    # only the largest logits and the two tokens: others vary more and do not matter
    top = scores[0].topk(min(8, len(scores[0]))).indices
    where = torch.unique(torch.cat((top, torch.tensor(tokens, device=top.device))))
    # a token cut off (top-k, top-p) in one pass only has varied infinitely; one cut off in all passes, not at all
    moved = [torch.nan_to_num((curve - curves[0])[where].abs(), nan=0.0, posinf=math.inf) for curve in curves]
    return min(needed), max(floor, *(float(each.max()) for each in moved))


def _logits(target: Target, text: list[int], width: int) -> Tensor:
    """Float32 logits after ``text``, with its last ``width`` tokens in one pass."""
    decoder = target.decoder
    cache = Cache(target.config, rows=1, capacity=len(text), dtype=decoder.dtype, device=decoder.device)
    cache.add_row()
    head = text[: len(text) - width]
    if head:
        decoder(Inputs.of_prompt(head), cache, need="hidden", planned=len(text))
        cache.commit([range(len(head))])
    logits_MV = decoder(Inputs.of_prompt(text[len(head) :]), cache, planned=len(text), need="logits").logits_MV
    assert logits_MV is not None
    last: Tensor = logits_MV[-1].float()
    return last
