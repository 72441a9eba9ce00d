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

from anabranch.declared import Keywords
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import InputError
from anabranch.methods import Drafter, Spec, make_drafter
from anabranch.model.encoder import Source
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target
from anabranch.options import requests
from anabranch.sampling import MIN_TEMPERATURE, gumbels, position_keys, process_logits

__all__ = ["Certificate", "certify", "last_logits"]

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
    call: Keywords | None = None,
    rows: int = 1,
    report: Callable[[Certificate], None] = lambda certificates: None,
) -> list[Certificate]:
    """Decode every prompt plainly and with the drafter ``spec``, and compare the tokens.

    modules  the modules trained for the target, as for ``make_drafter``
    call     the options of decoding; those left out are the defaults of the model's generation config
    rows     how many prompts are decoded with the drafter at a time, joining the batch as others leave; plain decoding
             is always one prompt at a time
    report   called with each prompt's result, in order

    Raises what ``make_drafter`` and ``Scheduler.submit`` raise, before anything is decoded.
    """
    if not prompts:
        raise InputError("there is nothing to certify; give at least one prompt")
    batch = requests(prompts, target, {**(call or {}), "max_new_tokens": max_new_tokens, "rows": rows})
    plain = _Decoding(target, make_drafter("none", target.decoder), batch, rows=1)
    drafted = _Decoding(target, make_drafter(spec, target.decoder, *modules), batch, rows=rows)
    certificates = []
    for index, request in enumerate(batch):
        certificates.append(_compare(target, index, request, plain.tokens(index), drafted.tokens(index)))
        report(certificates[-1])
    return certificates


class _Decoding:
    """Requests that are decoded with one drafter, ``rows`` at a time."""

    def __init__(self, target: Target, drafter: Drafter, requests: Sequence[Request], *, rows: int) -> None:
        self.scheduler = Scheduler(target.decoder, rows=rows, prefix_bytes=0)
        self.tickets = [self.scheduler.submit(request, drafter) for request in requests]

    def tokens(self, index: int) -> list[int]:
        """All tokens of a request; decodes until it is done."""
        return [token for step in self.scheduler.steps(self.tickets[index]) for token in step.tokens]


def _compare(target: Target, index: int, request: Request, plain: list[int], drafted: list[int]) -> Certificate:
    if plain == drafted:
        return Certificate(index, "equal", len(plain))
    shorter = min(len(plain), len(drafted))
    at = next((i for i in range(shorter) if plain[i] != drafted[i]), shorter)
    if at == shorter:
        # one output is a prefix of the other, but neither end tokens nor limits may depend on the drafter
        return Certificate(index, "BUG", len(plain), at)
    text = [*request.prompt_ids, *plain[:at]]
    margin, noise = _margin(target, request, text, (plain[at], drafted[at]))
    verdict: Literal["tie", "BUG"] = "tie" if margin <= SLACK * noise else "BUG"
    return Certificate(index, verdict, len(plain), at, plain[at], drafted[at], round(margin, 6), round(noise, 6))


@torch.inference_mode()
def _margin(target: Target, request: Request, text: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
    """The margin of two tokens after ``text``, and the variation of the logits between pass widths."""
    sampling, prompt = request.sampling, len(request.prompt_ids)
    widest = len(text) if target.decoder.rider is None else len(text) - prompt + 1
    passes = [
        last_logits(target, text, width, prompt=prompt, source=request.source)[-1]
        for width in WIDTHS
        if width <= widest
    ]
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


@torch.inference_mode()
def last_logits(
    target: Target, text: Sequence[int], width: int, *, prompt: int, source: Source | None = None
) -> Tensor:
    """Float32 logits [width, V] after each of the last ``width`` tokens of a text, from one pass over these.

    The first ``prompt`` tokens are the text's prompt, and ``source`` is what it is about. If the target has rows of its
    own (``Decoder.rider``), all prompt tokens but the last have none, so ``width`` must not reach further back than
    that one.
    """
    decoder = target.decoder
    assert decoder.rider is None or width <= len(text) - prompt + 1, "tokens with and without the target's own rows"
    capacity = len(text) if decoder.rider is None else decoder.rider.positions(len(text))
    cache = decoder.new_cache(1, capacity)
    memory = None if source is None else decoder.encode(source)
    cache.add_row(decoder.rope().prompt(prompt, len(text)), memory)
    start = len(text) - width
    bare = start if decoder.rider is None else min(start, prompt - 1)
    for head, rider in ((text[:bare], None), (text[bare:start], decoder.rider)):
        if head:
            decoder(Inputs.of_prompt(list(head)), cache, rider=rider, need="hidden")
            cache.commit([range(len(head))])
    last = Inputs.of_prompt(list(text[start:]))
    logits_MV = decoder(last, cache, rider=decoder.rider, need="logits").logits_MV
    assert logits_MV is not None
    logits: Tensor = logits_MV.float()
    return logits
