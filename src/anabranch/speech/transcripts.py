"""From sounds to transcripts: each file's windows one after another, or cut at pauses and decoded together.

One after another, a window begins where the last complete segment of the one before ended, and is shown its text, as in
OpenAI's Whisper; several files share the passes. Cut at pauses, all windows of all files do.

Drafts of a window are looked up in the text of the windows before it (``Source.tokens``), and those of a further
temperature in the text at the one before; neither changes what is decoded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anabranch.decoding.scheduler import Scheduler
from anabranch.decoding.stats import Stats
from anabranch.drafting.drafter import Drafter
from anabranch.errors import CapabilityError
from anabranch.model.encoder import Source
from anabranch.model.load import Target
from anabranch.speech.audio import FRAMES_A_SECOND, RATE, Samples, log_mel, window
from anabranch.speech.options import SpeechKeywords
from anabranch.speech.vocabulary import Vocabulary
from anabranch.speech.windows import HOT, Hypothesis, Segment, Windows, segments_of

__all__ = ["Transcript", "Window", "cut_at_pauses", "transcribe"]

SHORTEST = 2 / 3  # of a window that is cut at a pause: it ends at the quietest place of its last third
PAUSE = 31  # frames whose mean loudness is compared: 0.3 s, shorter than most pauses between sentences


@dataclass(frozen=True)
class Window:
    """A window as it was decoded: frames of the sound, the decoder's tokens before its text, and those of the text."""

    start: int
    stop: int
    prompt_ids: list[int]
    token_ids: list[int]


@dataclass(frozen=True)
class Transcript:
    """The text of one sound.

    segments              with times in seconds; without timestamps, one for each window
    language              its code; ``language_probability`` is 1 where it was given
    duration              seconds of sound
    seconds               from the beginning of the call to the end of this sound; several sounds share them
    stats                 the decoding of all windows, those at temperatures that did not fit included
    windows               with the end token, silent ones included
    """

    text: str
    segments: list[Segment]
    language: str
    language_probability: float
    duration: float
    seconds: float
    drafter: str
    stats: Stats = field(repr=False)
    windows: list[Window] = field(repr=False, default_factory=list)

    def __str__(self) -> str:
        return self.text

    @property
    def real_time_factor(self) -> float:
        """Seconds of decoding a second of sound; below 1 is faster than real time."""
        return self.seconds / self.duration

    def to_dict(self) -> dict[str, Any]:
        """The transcript as JSON values."""
        return {
            **{name: getattr(self, name) for name in ("text", "language", "language_probability", "duration")},
            "segments": [{"id": number, **asdict(segment)} for number, segment in enumerate(self.segments)],
            "seconds": round(self.seconds, 3),
            "real_time_factor": round(self.real_time_factor, 4),
            "drafter": self.drafter,
            "stats": self.stats.to_dict(),
        }


def transcribe(
    target: Target,
    scheduler: Scheduler,
    drafter: Drafter,
    sounds: Sequence[Samples],
    options: SpeechKeywords,
    cancelled: threading.Event | None = None,
) -> Generator[Transcript, None, None]:
    """Yield the transcripts of mono samples at 16 kHz in their order, each as soon as it and those before it are done.

    At most ``rows`` windows are decoded at a time. Closing the generator ends all after their current step.
    Raises CapabilityError for a target that does not read sound, and InputError for a language that it does not know.
    """
    encoder, began = target.config.encoder, time.perf_counter()
    if encoder is None or not encoder.channels:
        raise CapabilityError(f"{target.title} reads text, and only Whisper models transcribe; load one of them")
    vocabulary = Vocabulary.of(target.tokenizer, target.config.vocab_size)
    if options["language"] is not None:
        vocabulary.code(options["language"])
    windows = Windows(scheduler, drafter, target, vocabulary, options, cancelled or threading.Event())
    meter = _Meter(sum(map(len, sounds)) / RATE, options["on_progress"])
    return _transcripts(windows, sounds, partial(_Sound.start, windows, encoder.channels, meter, began))


def _transcripts(
    windows: Windows, sounds: Sequence[Samples], start: Callable[[Samples], _Sound]
) -> Generator[Transcript, None, None]:
    with _Pool(int(windows.options["rows"]), windows.cancelled) as pool:
        if not windows.options["parallel"]:
            running = [pool.run(partial(_in_turn, start, samples)) for samples in sounds]
            yield from (each.result() for each in running)
            return
        started = [pool.run(partial(start, samples)) for samples in sounds]
        read = [each.result() for each in started]
        cuts = [cut_at_pauses(sound.features, windows.frames) for sound in read]
        jobs = [
            [pool.run(partial(sound.window_alone, *cut)) for cut in own] for sound, own in zip(read, cuts, strict=True)
        ]
        yield from (sound.transcript([job.result() for job in own]) for sound, own in zip(read, jobs, strict=True))


def _in_turn(start: Callable[[Samples], _Sound], samples: Samples) -> Transcript:
    return start(samples).in_turn()


def cut_at_pauses(features: Tensor, longest: int) -> list[tuple[int, int]]:
    """The frames (start, stop) of windows that cover features [bins, frames] and end at quiet places.

    longest  frames of a window; only the last one has less than two thirds of them
    """
    frames = features.shape[1]
    loudness = torch.nn.functional.avg_pool1d(
        features.mean(dim=0)[None, None], PAUSE, stride=1, padding=PAUSE // 2, count_include_pad=False
    )[0, 0]
    starts = [0]
    while frames - starts[-1] > longest:
        least = starts[-1] + int(longest * SHORTEST)
        starts.append(least + int(loudness[least : starts[-1] + longest].argmin()))
    return list(zip(starts, (*starts[1:], frames), strict=True))


class _Meter:
    """Adds up the progress of all sounds."""

    def __init__(self, total: float, report: Callable[[float, float], None] | None) -> None:
        self.total, self.report, self.done = total, report, 0.0
        self._lock = threading.Lock()

    def add(self, frames: int) -> None:
        """So many frames more are done."""
        with self._lock:
            self.done = min(self.total, self.done + frames / FRAMES_A_SECOND)
            if self.report is not None:
                self.report(self.done, self.total)


class _Pool:
    """Threads of which each decodes one window at a time; the first error, or Ctrl-C, ends all of them."""

    def __init__(self, rows: int, cancelled: threading.Event) -> None:
        self.cancelled = cancelled
        # torch's number of CPU threads is set per thread
        self._executor = ThreadPoolExecutor(
            rows, "anabranch", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancelled.set()
        self._executor.shutdown(cancel_futures=True)

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job."""
        return self._executor.submit(job)


class _Sound:
    """One sound while its windows are decoded.

    first  its beginning, until it is decoded: the encoder has read it if the language was to be detected
    said   the tokens of all its windows so far, for drafts
    """

    def __init__(
        self,
        windows: Windows,
        features: Tensor,
        duration: float,
        language: tuple[str, float],
        meter: _Meter,
        began: float,
        first: Source | None,
    ) -> None:
        self.windows, self.features, self.duration, self.first = windows, features, duration, first
        self.language, self.meter, self.began = language, meter, began
        self.said: list[int] = []
        self.stats: list[Stats] = []
        self.decoded: list[Window] = []
        self.drafter = ""

    @staticmethod
    def start(windows: Windows, bins: int, meter: _Meter, began: float, samples: Samples) -> _Sound:
        """Compute the features, and detect the language in the first window if none is given."""
        features, given = log_mel(samples, bins), windows.options["language"]
        first = Source(features=window(features, 0, features.shape[1], windows.frames))
        language = windows.language(first) if given is None else (windows.vocabulary.code(given), 1.0)
        kept = None if windows.options["parallel"] else first  # of many sounds, what the encoder gives takes gigabytes
        return _Sound(windows, features, len(samples) / RATE, language, meter, began, kept)

    def in_turn(self) -> Transcript:
        """Decode window after window."""
        options, end = self.windows.options, self.features.shape[1]
        opening = options["initial_prompt"].strip()
        before = self.windows.tokenizer.encode(f" {opening}", add_special_tokens=False) if opening else []
        segments: list[Segment] = []
        at = 0
        while at < end:
            frames = min(self.windows.frames, end - at)
            hypothesis = self._decoded(at, at + frames, before)
            following = at + frames
            if not hypothesis.silent:
                more, following = segments_of(self.windows, hypothesis, at, frames)
                segments += more
                before = [*before, *(token for segment in more for token in segment.tokens)]
            if not options["condition_on_previous_text"] or hypothesis.temperature > HOT:
                before = []
            self.meter.add(min(following, end) - at)
            at = following
        return self.transcript([segments])

    def window_alone(self, start: int, stop: int) -> list[Segment]:
        """The segments of one window of several that are decoded together."""
        hypothesis = self._decoded(start, stop, ())
        self.meter.add(stop - start)
        return [] if hypothesis.silent else segments_of(self.windows, hypothesis, start, stop - start, whole=True)[0]

    def _decoded(self, start: int, stop: int, before: Sequence[int]) -> Hypothesis:
        source, self.first = self.first, None
        if source is None:
            source = Source(tokens=tuple(self.said), features=window(self.features, start, stop, self.windows.frames))
        prompt = self.windows.prompt(self.language[0], before)
        hypothesis = self.windows.decode(source, prompt)
        self.said += hypothesis.tokens
        end = [self.windows.vocabulary.end] if hypothesis.ended else []
        self.decoded.append(Window(start, stop, prompt, [*hypothesis.tokens, *end]))
        self.stats.append(hypothesis.stats)
        self.drafter = hypothesis.drafter
        return hypothesis

    def transcript(self, parts: Sequence[Sequence[Segment]]) -> Transcript:
        """The transcript of windows' segments."""
        segments = [segment for part in parts for segment in part]
        text = "".join(segment.text for segment in segments).strip()
        seconds = time.perf_counter() - self.began
        about = (*self.language, self.duration, seconds, self.drafter, Stats.merged(self.stats))
        return Transcript(text, segments, *about, sorted(self.decoded, key=lambda each: each.start))
