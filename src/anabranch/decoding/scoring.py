"""The target's log probabilities of given texts, read in chunks like prompts."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from anabranch.decoding.batch import check_tokens
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import CapabilityError, InputError, NumericsError
from anabranch.model.inputs import Inputs
from anabranch.sampling import log_probs, top_log_probs

__all__ = ["Score", "perplexity", "score", "scoring"]

CHUNK = 128  # tokens of a pass; their logits take 25 MB at 49,152 words


@dataclass(frozen=True)
class Score:
    """A text's tokens, and the target's raw log probability of each given those before; the first has none.

    log_probs      [len(token_ids) - 1], of all tokens but the first
    top_log_probs  [len(token_ids) - 1], at each of them the most probable tokens by id, as many as were asked for
    """

    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[dict[int, float]] = field(default_factory=list)

    @property
    def total(self) -> float:
        """The log probability of the text given its first token."""
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log probability; NaN for a text of one token."""
        return perplexity([self])

    def __repr__(self) -> str:
        return f"Score({len(self.token_ids)} tokens, total={self.total:.4f}, perplexity={self.perplexity:.4f})"


def perplexity(scores: Sequence[Score]) -> float:
    """The perplexity of all texts together: each token counts alike. NaN if there is no token to predict."""
    count = sum(len(each.log_probs) for each in scores)
    return math.exp(-math.fsum(each.total for each in scores) / count) if count else math.nan


def score(scheduler: Scheduler, tokens: Sequence[int], lora: str | None = None) -> Score:
    """The score of one text. Passes alternate with the steps of texts that are being decoded.

    Raises what ``scoring`` raises.
    """
    passes = scoring(scheduler, tokens, lora)
    while True:
        try:
            next(passes)
        except StopIteration as ended:
            result: Score = ended.value
            return result


def scoring(
    scheduler: Scheduler, tokens: Sequence[int], lora: str | None = None, *, top: int = 0
) -> Generator[None, None, Score]:
    """Score one text pass by pass, for a caller that decodes other texts in between; returns the score.

    top  of how many of the most probable tokens to give the log probabilities at each place

    Raises InputError for a text that does not fit the model, CapabilityError for a target whose passes have streams.
    """
    target, config = scheduler.target, scheduler.target.config
    if target.rider is not None:
        raise CapabilityError("this target's passes have streams, so it has no score of a text; load the model without")
    if target.encoder is not None:
        raise CapabilityError("this model writes a text about a source, so it has no score of a text by itself")
    if lora is not None:
        target.loras.check(lora)
    check_tokens(tokens, config.vocab_size, "the text")
    if len(tokens) > config.max_positions:
        raise InputError(
            f"the text has {len(tokens)} tokens, but the model's limit is {config.max_positions}; split it"
        )
    values: list[float] = []
    best: list[dict[int, float]] = []
    with scheduler.alone(), target.inference():
        cache = target.new_cache(1, len(tokens))
        cache.add_row(target.rope().prompt(len(tokens), len(tokens)))
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = list(tokens[start : min(start + CHUNK, len(tokens) - 1)])
        with scheduler.alone(), target.inference():
            result = target.forward(Inputs.of_prompt(chunk), cache, loras=(lora,), need="logits")
            cache.commit([range(len(chunk))])
            after = torch.tensor(tokens[start + 1 : start + 1 + len(chunk)], device=target.device)
            assert result.logits_MV is not None, "needed"
            values += log_probs(result.logits_MV, after).tolist()
            best += top_log_probs(result.logits_MV, top) if top else []
        yield
    if not all(map(math.isfinite, values)):
        raise NumericsError("the model's scores are not finite numbers; load it with dtype='float32'")
    return Score(list(tokens), values, best)
