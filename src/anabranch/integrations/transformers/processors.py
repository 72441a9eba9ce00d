"""The logits processors of a ``generate`` call, as anabranch runs them: on one node of a draft tree at a time.

B rows of the batch, L tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from anabranch.errors import CapabilityError
from anabranch.sampling import SamplingParams

__all__ = ["RowProcessors", "check_processors", "sampling_of"]

# Their result for a row does not depend on which rows are beside it, nor on its place in the batch.
ROWWISE = (
    *(hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TopHLogitsWarper),
    *(hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.LogitNormalization),
    *(hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.NoRepeatNGramLogitsProcessor),
    *(hf.SequenceBiasLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.ForcedBOSTokenLogitsProcessor),
    *(hf.ForcedEOSTokenLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.ExponentialDecayLengthPenalty),
    *(hf.SuppressTokensLogitsProcessor, hf.SuppressTokensAtBeginLogitsProcessor, hf.WatermarkLogitsProcessor),
)
ALONE = (*ROWWISE, hf.PrefixConstrainedLogitsProcessor)  # the latter is made for each row
# They keep a state from one call to the next, or need rows that are not in the batch.
STATEFUL = (
    *(hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.ClassifierFreeGuidanceLogitsProcessor),
    hf.SynthIDTextWatermarkLogitsProcessor,
)


def check_processors(processors: Sequence[Any]) -> None:
    """Raise CapabilityError for a processor of transformers that must see every token once and in order."""
    for processor in processors:
        if isinstance(processor, STATEFUL):
            raise CapabilityError(
                f"{type(processor).__name__} is not supported with custom_generate: it must see each token once, and a "
                "draft has several at a position; leave out what asks for it, or custom_generate"
            )


class RowProcessors:
    """All processors of one row: (tokens of the row, logits [V]) -> logits [V], as in ``SamplingParams.processors``.

    They get what transformers would give them: the row of ``input_ids`` with its padding and the tokens after it.
    Processors that may look at a row's place in the batch get a batch of B equal rows, and the row at that place is
    taken.

    recording  whether to keep logits before and after the processors, for ``taken``
    """

    def __init__(self, processors: Sequence[Any], input_ids: Tensor, row: int, *, prompt: int, recording: bool) -> None:
        alone = [_for_row(processor, row) for processor in processors]
        self._processors = [(hf.LogitsProcessorList([p]), isinstance(p, ALONE)) for p in alone]
        self._prompt_L, self._rows, self._row = input_ids[row], len(input_ids), row
        self._length, self._recording = prompt, recording
        self._seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        """Apply all processors to the logits after ``tokens``, prompt included."""
        new = tuple(tokens[self._length :])
        ids = torch.cat((self._prompt_L, torch.tensor(new, dtype=torch.long, device=self._prompt_L.device)))[None]
        scores = logits_V.to(ids.device, torch.float32)[None]
        raw = scores[0].clone() if self._recording else scores[0]
        for processor, rowwise in self._processors:
            rows = 1 if rowwise else self._rows
            scores = processor(ids.expand(rows, -1), scores.expand(rows, -1).contiguous())
            scores = scores[0 if rows == 1 else self._row][None]
        if self._recording:
            self._seen[new] = (raw, scores[0].clone())
        return scores[0].to(logits_V.device)

    def taken(self, before: Sequence[int], tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Raw and processed logits [V] that each of ``tokens`` was chosen from, after the new tokens ``before``."""
        texts = [tuple(before) + tuple(tokens[:n]) for n in range(len(tokens))]
        parsed = [self._seen[text] for text in texts]
        known = len(before) + len(tokens)  # later steps may have been decoded already
        self._seen = {text: logits for text, logits in self._seen.items() if len(text) >= known}
        return parsed


def sampling_of(
    processors: Sequence[Any], input_ids: Tensor, row: int, *, prompt: int, sample: bool, seed: int, recording: bool
) -> tuple[SamplingParams, RowProcessors | None]:
    """The sampling parameters of a row, and those processors that have no parameter of ours.

    prompt     number of prompt tokens in the row, without padding
    sample     ``do_sample``
    recording  whether logits must be kept: then all processors run as they are
    """
    left = list(processors)
    fields: dict[str, Any] = {"temperature": 1.0 if sample else 0.0, "seed": seed}
    if not recording:
        if sample:
            left, parsed = _warpers(left)
            fields |= parsed
        if left and (penalty := _penalty(left[0], input_ids, row, prompt)) is not None:
            fields["repetition_penalty"] = penalty
            left = left[1:]
    run = None
    if left or recording:
        run = RowProcessors(left, input_ids, row, prompt=prompt, recording=recording)
    return SamplingParams(**fields, processors=() if run is None else (run,)), run


def _for_row(processor: Any, row: int) -> Any:
    """The processor itself, or what it is for one row of the batch."""
    if type(processor) is hf.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor


def _warpers(processors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split off the last processors as far as they are temperature, top-k, top-p and min-p, in this order."""
    known = (
        (hf.MinPLogitsWarper, "min_p"),
        (hf.TopPLogitsWarper, "top_p"),
        (hf.TopKLogitsWarper, "top_k"),
        (hf.TemperatureLogitsWarper, "temperature"),
    )
    left, fields, limit = list(processors), {}, {"min_p": 1.0}
    for kind, name in known:
        if left and type(left[-1]) is kind and _usual(left[-1]) and 0 < getattr(left[-1], name) != limit.get(name):
            fields[name] = getattr(left.pop(), name)
    return left, fields


def _usual(warper: Any) -> bool:
    """Return whether a warper forbids tokens altogether and may leave a single one."""
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -torch.inf) == -torch.inf


def _penalty(processor: Any, input_ids: Tensor, row: int, prompt: int) -> float | None:
    """The factor of a repetition penalty over exactly the row's tokens without padding; None for anything else."""
    if type(processor) is not hf.RepetitionPenaltyLogitsProcessor:
        return None
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = int(ignored.reshape(-1)[row]) if ignored.numel() == len(input_ids) else -1
    return float(processor.penalty) if (ignored or 0) == input_ids.shape[1] - prompt else None
