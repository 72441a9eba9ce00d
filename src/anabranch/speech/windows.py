"""One window of at most 30 s: its text at the first temperature that fits, and the segments that its timestamps mark.

The thresholds, and what follows from them, are those of OpenAI's ``transcribe`` (Radford et al. 2022, section 4.5).
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anabranch.declared import LogitsProcessor, ScoreKeywords
from anabranch.decoding import generation
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter
from anabranch.model.encoder import Source
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target
from anabranch.native.library import library
from anabranch.processors import score_processors
from anabranch.sampling import SamplingParams
from anabranch.speech.audio import FRAMES_A_SECOND
from anabranch.speech.options import SpeechKeywords
from anabranch.speech.vocabulary import Vocabulary

__all__ = ["Confidence", "Hypothesis", "Segment", "Windows", "segments_of", "timestamp_rules"]

LATEST = 50  # timestamps after 0.00 that a window may begin with: 1 s, as in OpenAI's Whisper
ROUNDING = 0.01  # above that of a log-sum-exp in float32
HOT = 0.5  # a text decoded at a higher temperature is not shown to later windows


@dataclass(frozen=True)
class Hypothesis:
    """A window's text.

    tokens             without the end token; with timestamps if they were asked for
    avg_log_prob       the mean log probability of a token, the end token included
    compression_ratio  bytes of the text by those that zlib needs; above 2.4 it repeats itself
    no_speech_prob     the probability that nothing is said; None where the text was probable enough not to ask
    silent             it is taken for silence
    ended              the end token followed; not where the text became too long
    """

    tokens: list[int]
    text: str
    temperature: float
    avg_log_prob: float
    compression_ratio: float
    stats: Stats
    drafter: str
    no_speech_prob: float | None = None
    silent: bool = False
    ended: bool = True


@dataclass(frozen=True)
class Segment:
    """A part of a transcript from ``start`` to ``end``, in seconds of the file, as its window's timestamps mark it.

    tokens  of the text, timestamps included. The other fields are those of the window's ``Hypothesis``
    """

    start: float
    end: float
    text: str
    tokens: list[int] = field(repr=False)
    temperature: float
    avg_log_prob: float
    compression_ratio: float
    no_speech_prob: float | None


class Windows:
    """Decodes windows, each with the options of one call; calls from several threads share passes.

    suppressed  the model's options ``suppress_tokens`` and ``begin_suppress_tokens``
    frames      of a window: 30 s
    longest     tokens of a text
    cancelled   ends the call after the current step
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafter: Drafter,
        target: Target,
        vocabulary: Vocabulary,
        options: SpeechKeywords,
        cancelled: threading.Event,
    ) -> None:
        self.scheduler, self.drafter, self.tokenizer = scheduler, drafter, target.tokenizer
        self.vocabulary, self.options, self.cancelled = vocabulary, options, cancelled
        names, scores = ("suppress_tokens", "begin_suppress_tokens"), target.generation.scores
        suppressed: Any = {name: scores.get(name) for name in names}
        self.suppressed: ScoreKeywords = suppressed
        encoder = target.config.encoder
        assert encoder is not None, "checked"
        self.frames = 2 * encoder.layers.max_positions
        # half of the decoder's positions each for the text before and the text itself, as in OpenAI's Whisper
        self.longest = scheduler.target.config.max_positions // 2

    def prompt(self, language: str, before: Sequence[int]) -> list[int]:
        """The decoder's tokens before a window's text; ``before`` is the text of earlier windows."""
        kept = before[-(self.longest - 1) :] if self.longest > 1 else ()
        return self.vocabulary.prompt(language, self.options["task"], kept, timestamps=self.options["timestamps"])

    def language(self, source: Source) -> tuple[str, float]:
        """The most probable language of a window, and its probability among all languages."""
        languages = self.vocabulary.languages
        if not languages:
            return "en", 1.0
        scores_V = self._scores(source, [self.vocabulary.start])
        probs = scores_V[list(languages.values())].softmax(0)
        best = int(probs.argmax())
        return list(languages)[best], float(probs[best])

    def decode(self, source: Source, prompt: list[int]) -> Hypothesis:
        """The text at the first temperature at which it is neither improbable nor repetitive; else at the last."""
        options, temperatures, hypothesis = self.options, self.options["temperature"], None
        assert isinstance(temperatures, Sequence)
        for temperature in temperatures:
            hypothesis = self._decoded(source, prompt, temperature, () if hypothesis is None else hypothesis.tokens)
            probable = hypothesis.avg_log_prob >= options["log_prob_threshold"]
            repetitive = hypothesis.compression_ratio > options["compression_ratio_threshold"]
            if hypothesis.silent or (probable and not repetitive):
                break
        assert hypothesis is not None, "there is at least one temperature"
        return hypothesis

    def _decoded(self, source: Source, prompt: list[int], temperature: float, expected: Sequence[int]) -> Hypothesis:
        """A window's text at one temperature, with drafts from the text at the temperature before."""
        end, confidence = self.vocabulary.end, Confidence()
        new, size = self.longest, self.scheduler.target.config.vocab_size
        rules = [*score_processors(self.suppressed, prompt, {end}, len(prompt) + new, size)]
        rules += [timestamp_rules(self.vocabulary, len(prompt))] if self.options["timestamps"] else []
        sampling = SamplingParams(temperature=temperature, seed=self.options["seed"], processors=(*rules, confidence))
        guess = tuple(expected) if self.drafter.max_nodes > 1 else ()  # plain decoding drafts nothing
        request = Request(prompt, new, sampling, frozenset({end}), source=source, prediction=guess)
        (result,) = generation.generate(
            self.scheduler, [request], self.drafter, self.tokenizer, cancelled=self.cancelled
        )
        tokens = [token for token in result.token_ids if token != end]
        text = self.text(tokens)
        mean = confidence.total(prompt, result.token_ids) / (len(tokens) + 1)
        silence = None
        if mean <= self.options["log_prob_threshold"]:
            before = prompt[: prompt.index(self.vocabulary.start) + 1]
            silence = float(self._scores(source, before).softmax(0)[self.vocabulary.no_speech])
        silent = silence is not None and silence > self.options["no_speech_threshold"]
        ratio = compression_ratio(text)
        about = (temperature, mean, ratio, result.stats, result.drafter, silence, silent)
        return Hypothesis(tokens, text, *about, ended=end in result.token_ids)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without timestamps."""
        return str(self.tokenizer.decode(self.vocabulary.text(tokens)))

    def _scores(self, source: Source, tokens: list[int]) -> Tensor:
        """The target's logits [V] of the token after ``tokens``, float32."""
        target = self.scheduler.target
        with self.scheduler.alone(), target.inference():
            cache = target.new_cache(1, len(tokens) + 1)
            cache.add_row(target.rope().prompt(len(tokens), len(tokens)), target.encode(source))
            result = target.forward(Inputs.of_prompt(tokens), cache, need="logits")
            assert result.logits_MV is not None, "needed"
            return result.logits_MV[-1].float()


def compression_ratio(text: str) -> float:
    """Bytes of a text by those that zlib needs for it."""
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data))


def segments_of(
    windows: Windows, hypothesis: Hypothesis, start: int, frames: int, *, whole: bool = False
) -> tuple[list[Segment], int]:
    """The segments of a window of ``frames`` frames that begins at frame ``start``, and the frames to go on from.

    A segment ends where two timestamps meet. What follows the last such pair begins the next window, unless the window
    is decoded as a ``whole`` or a timestamp ends it: then nothing is said after it.
    """
    vocabulary, tokens = windows.vocabulary, hypothesis.tokens
    first, offset = vocabulary.first_timestamp, start / FRAMES_A_SECOND
    stamped = [token >= first for token in tokens]
    ends = [at for at in range(1, len(tokens)) if stamped[at] and stamped[at - 1]]
    closed = len(tokens) >= 2 and stamped[-1] and not stamped[-2]
    step, parts = frames, [tokens]
    if ends:
        if closed or whole:
            ends.append(len(tokens))
        else:
            step = round(vocabulary.seconds(tokens[ends[-1] - 1]) * FRAMES_A_SECOND) or frames
        parts = [tokens[a:b] for a, b in zip((0, *ends), ends, strict=False)]
    segments = []
    for part in parts:
        times = [vocabulary.seconds(token) for token in part if token >= first]
        begin = times[0] if ends and times else 0.0
        last = times[-1] if times and (len(times) > 1 or not ends) and times[-1] > 0 else frames / FRAMES_A_SECOND
        if whole:  # the next window begins there
            last = min(last, frames / FRAMES_A_SECOND)
        text = windows.text(part)
        if text.strip() and last > begin:
            about = (hypothesis.temperature, hypothesis.avg_log_prob, hypothesis.compression_ratio)
            times_of_file = (round(offset + begin, 2), round(offset + last, 2))
            segments.append(Segment(*times_of_file, text, list(part), *about, hypothesis.no_speech_prob))
    return segments, start + step


# -- logits processors, which plain decoding and drafts follow alike (V vocabulary) --------------------------
def timestamp_rules(vocabulary: Vocabulary, begin: int) -> LogitsProcessor:
    """OpenAI's ``ApplyTimestampRules`` for a text that begins after ``begin`` tokens.

    Timestamps come in pairs, except before the end, and never decrease; the first token is one of at most 1 s; and
    where all timestamps together are more probable than any other token, the next token is a timestamp.
    """
    return partial(_apply, vocabulary, begin)


def _apply(vocabulary: Vocabulary, begin: int, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    first, text = vocabulary.first_timestamp, tokens[begin:]
    row: Any = logits_V.numpy() if logits_V.is_cpu else logits_V  # NumPy takes a third of the time on parts of a row
    row[vocabulary.no_timestamps] = -math.inf
    if not text:
        row[:first] = -math.inf
        row[first + LATEST + 1 :] = -math.inf
        return logits_V
    paired = len(text) < 2 or text[-2] >= first
    if text[-1] >= first:
        if paired:  # text follows
            row[first:] = -math.inf
        else:  # the second of a pair follows, or the end
            row[: vocabulary.end] = -math.inf
    last = next((token for token in reversed(text) if token >= first), None)
    if last is not None:
        open_pair = text[-1] >= first and not paired
        row[first : last if open_pair else last + 1] = -math.inf
    if _timestamps_prevail(logits_V[first:], float(row[first:].max()), float(row[:first].max())):
        row[:first] = -math.inf
    return logits_V


def _timestamps_prevail(times_T: Tensor, best: float, other: float) -> bool:
    """Return whether all timestamps together are more probable than any other token, whose largest logit is ``other``.

    Their log-sum-exp is at least their largest logit, ``best``, and at most log(T) above it, which mostly decides.
    """
    if best > other:
        return True
    if best + math.log(len(times_T)) + ROUNDING < other:
        return False
    return bool(torch.logsumexp(times_T, 0) > other)


class Confidence:
    """A processor that changes nothing and records the log probability of each token that follows.

    As the last one it sees what temperature divides, which is where OpenAI's Whisper takes log probabilities. Decoding
    asks for each place of a text once, in order (``verify.follow``).
    """

    def __init__(self) -> None:
        self._values: dict[int, float] = {}  # by place of the token
        self._last: tuple[int, Tensor] | None = None

    def __call__(self, tokens: Sequence[int], logits_V: Tensor) -> Tensor:
        """Record the last token of ``tokens``, and keep the logits [V] of the next."""
        self._settle(tokens)
        self._last = len(tokens), logits_V
        return logits_V

    def _settle(self, tokens: Sequence[int]) -> None:
        if self._last is not None and self._last[0] < len(tokens):
            place, logits_V = self._last
            self._values[place] = float(logits_V[tokens[place]]) - _log_sum(logits_V)

    def total(self, prompt: Sequence[int], new: Sequence[int]) -> float:
        """The log probability of the tokens ``new`` after ``prompt``."""
        self._settle([*prompt, *new])
        return math.fsum(self._values.get(len(prompt) + place, 0.0) for place in range(len(new)))


def _log_sum(logits_V: Tensor) -> float:
    """The log-sum-exp of logits [V], by the kernels where there are any: PyTorch takes three times as long."""
    kernels = library() if logits_V.is_cpu and logits_V.dtype == torch.float32 else None
    if kernels is None:
        return float(logits_V.logsumexp(0))
    values, places = kernels.best(logits_V[None], 1)
    return float(logits_V[places[0, 0]] - values[0, 0])
