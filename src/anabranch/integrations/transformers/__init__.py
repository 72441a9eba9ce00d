"""Speculative decoding of a transformers model: ``model.generate(..., custom_generate=custom_generate)``.

The model's weights are decoded by anabranch's own decoder and loop. The GenerationConfig, logits processors, stopping
criteria and streamers of the call are honoured; what is not supported is refused with a CapabilityError
(docs/integrations.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from anabranch.decoding.engine import Request
from anabranch.decoding.stats import Stats
from anabranch.errors import InputError
from anabranch.integrations.transformers.config import (
    arguments_of_generate,
    check_arguments,
    check_config,
    prompts_of,
)
from anabranch.integrations.transformers.decoding import decode
from anabranch.integrations.transformers.processors import check_processors, sampling_of
from anabranch.integrations.transformers.target import model_of, release
from anabranch.methods import AUTO, Spec, parse_spec
from anabranch.model.load import name_tokenizer
from anabranch.verify import Rule

__all__ = ["SpeculativeOutput", "custom_generate", "release"]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The result of ``generate`` with ``return_dict_in_generate``: transformers' fields, and ``stats`` of each row.

    There are no attentions, hidden states or past_key_values. Scores and logits of a row that has ended are 0 for the
    padding token and -inf elsewhere.
    """

    stats: tuple[Stats, ...] | None = None


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: str | Spec = AUTO,
    adapter: str | Path | Sequence[str | Path] | None = None,
    rule: Rule = "match",
    target_tokenizer: Any = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """The decoding loop of ``model.generate``; pass it as ``custom_generate``, with these options beside it:

    drafter           a method and its settings, as in ``anabranch.load``; "auto" uses those that need no training, and
                      those whose adapter is available
    adapter           an adapter folder, or several; None: those shipped for this model
    rule              the verification rule: "match" or "rejection"
    target_tokenizer  the model's tokenizer, with which draft models and tables are compared; None: they are compared by
                      the size of the vocabulary at most

    A ``streamer`` of the ``generate`` call is used.

    Returns the sequences [B, L + T], int64, or a SpeculativeOutput if ``return_dict_in_generate``. Greedy tokens are
    those of transformers up to rounding. Sampled tokens have its distribution but not its random draws: they depend on
    ``torch.manual_seed`` alone, and with "match" not on the drafter.

    Raises CapabilityError for a model or an argument that would not be honoured, InputError for an invalid one, and
    whatever ``anabranch.load`` raises for the weights.
    """
    assert generation_config is not None, "generate passes it"
    parse_spec(drafter)
    check_config(generation_config)
    hidden = arguments_of_generate()
    check_arguments(hidden, model_kwargs)
    check_processors(logits_processor)
    prompts = prompts_of(input_ids, model_kwargs)
    folders = () if adapter is None else (adapter,) if isinstance(adapter, str | Path) else tuple(adapter)
    target = model_of(model, [Path(folder).expanduser() for folder in folders])
    if target_tokenizer is not None:
        name_tokenizer(target.target.decoder, target_tokenizer)
    new = _new_tokens(stopping_criteria, generation_config, input_ids, prompts, target.target.config.max_positions)
    ends = _end_tokens(stopping_criteria)
    recording = bool(
        generation_config.return_dict_in_generate
        and (generation_config.output_scores or generation_config.output_logits)
    )
    requests, processors = [], []
    for row, (prompt, seed) in enumerate(zip(prompts, _seeds(len(prompts), generation_config.do_sample), strict=True)):
        sampling, run = sampling_of(
            logits_processor,
            input_ids,
            row,
            prompt=len(prompt),
            sample=bool(generation_config.do_sample),
            seed=seed,
            recording=recording,
        )
        requests.append(Request(prompt, new, sampling, ends, rule))
        processors.append(run)
    decoded = decode(
        target.scheduler,
        target.drafter_of(drafter),
        requests,
        processors,
        input_ids,
        criteria=stopping_criteria,
        pad=int(generation_config._pad_token_tensor) if ends else None,
        streamer=streamer or hidden.get("streamer"),
        recording=recording,
    )
    if not generation_config.return_dict_in_generate:
        return decoded.sequences
    return SpeculativeOutput(
        sequences=decoded.sequences,
        scores=decoded.scores if generation_config.output_scores else None,
        logits=decoded.raw if generation_config.output_logits else None,
        stats=decoded.stats,
    )


def _seeds(rows: int, sample: bool | None) -> list[int]:
    """A seed for each row, from torch's own random numbers; sampling must not repeat the rows of one prompt."""
    return torch.randint(2**62, (rows,)).tolist() if sample else [0] * rows


def _end_tokens(criteria: Sequence[Any]) -> frozenset[int]:
    """The tokens at which some criterion ends a text."""
    ends = [criterion.eos_token_id for criterion in criteria if getattr(criterion, "eos_token_id", None) is not None]
    return frozenset(int(token) for end in ends for token in torch.as_tensor(end).reshape(-1).tolist())


def _new_tokens(criteria: Any, config: Any, input_ids: Tensor, prompts: Sequence[list[int]], limit: int) -> int:
    """The number of tokens that may be added to each row. Raises InputError if the model's context is too short."""
    longest = config.max_length if criteria.max_length is None else criteria.max_length
    new = int(longest) - input_ids.shape[1]
    if new < 1:
        raise InputError(f"max_length must be more than the prompt's {input_ids.shape[1]} tokens, got {longest}")
    most = max(map(len, prompts))
    if most + new > limit:
        raise InputError(
            f"a prompt of {most} tokens and {new} new ones exceed the model's context length of {limit}; lower "
            "max_new_tokens"
        )
    return new
