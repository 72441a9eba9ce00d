"""``anabranch transcribe``: the text of sound files, with times."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import completion, options, show
from anabranch.cli.configured import configured
from anabranch.errors import FileError, InputError
from anabranch.loading import LoadConfig
from anabranch.speech.options import SPEECH, SpeechKeywords, checked
from anabranch.support.files import check_output, write_atomically

if TYPE_CHECKING:
    from anabranch.speech.transcripts import Transcript

__all__ = ["TranscribeConfig", "transcribe"]

FORMATS = ("txt", "srt", "vtt", "json")  # of ``speech.captions``, whose import takes seconds


def _offered() -> SpeechKeywords:
    """The options of a call that the command offers."""
    defaults: Any = {name: option.default for name, option in SPEECH.items() if name not in ("drafter", "on_progress")}
    return defaults  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class TranscribeConfig:
    """The options of ``anabranch transcribe``."""

    files: Annotated[tuple[Path, ...], typer.Argument(metavar="FILE", help="the sound files (WAV)")]
    loading: LoadConfig = field(default=LoadConfig())
    drafter: options.DefaultDrafter = None
    call: SpeechKeywords = field(default_factory=_offered)
    format: Annotated[
        tuple[str, ...],
        typer.Option(
            help="write txt, srt, vtt or json; with --out repeatable", autocompletion=completion.one_of(*FORMATS)
        ),
    ] = ("txt",)
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write NAME.FORMAT for each file here (default: print)")
    ] = None
    force: options.Force = False


@configured
def transcribe(config: TranscribeConfig) -> None:
    """Transcribe sound files with a Whisper model.

    The model is a folder of Hugging Face's or of CTranslate2's layout (--model). Each window of 30 s begins where the
    last complete segment ended and is shown the text before it; several files are decoded together. --parallel cuts
    files at pauses instead and decodes their windows together.

    With --out, each file's transcript is written as soon as it and those before it are done.
    """
    targets = _targets(config)
    call: Any = {**config.call, "drafter": config.drafter}
    checked(call)
    with show.Wait() as wait:
        for path in config.files:
            if not path.expanduser().is_file():
                raise FileError(f"there is no file {path}; give the path of a WAV file")
        loaded = show.load_model(config.loading, config.drafter, {}, wait)
        call["on_progress"] = _bar(wait)
        done: list[Transcript] = []
        for number, transcript in enumerate(loaded.transcripts(list(config.files), **call)):
            done.append(transcript)
            with show.above_the_line():
                _write(config, number, transcript, targets)
    show.sentences([*_facts(done), *show.lesser_kernels(loaded)])


def _targets(config: TranscribeConfig) -> list[dict[str, Path]]:
    """The files that each sound's transcript is written to, by format; none where it is printed."""
    if unknown := [each for each in config.format if each not in FORMATS]:
        raise InputError(f"--format must be txt, srt, vtt or json, got {unknown[0]!r}")
    if config.out is None:
        if len(config.format) > 1:
            raise InputError("several formats need --out FOLDER; one of them can be printed")
        if len(config.files) > 1 and config.format[0] in ("srt", "vtt"):
            raise InputError(f"several files as {config.format[0]} need --out FOLDER")
        return []
    folder = config.out.expanduser()
    targets = [{kind: folder / f"{path.stem}.{kind}" for kind in config.format} for path in config.files]
    counts = Counter(path for each in targets for path in each.values())
    for path, count in counts.items():
        if count > 1:
            raise InputError(f"two files would be written as {path}; give files with names of their own")
        check_output(path, force=config.force, what="the transcript")
    return targets


def _write(config: TranscribeConfig, number: int, transcript: Transcript, targets: list[dict[str, Path]]) -> None:
    """Write one transcript to its files, or print it."""
    from anabranch.speech.captions import FORMATS as WRITERS

    for kind, path in (targets[number] if targets else {}).items():
        try:
            write_atomically(path, WRITERS[kind](transcript))
        except OSError as error:
            raise FileError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
    if not targets:
        if len(config.files) > 1 and config.format[0] == "txt":
            show.note(f"{config.files[number]}:")
        sys.stdout.write(show.for_stdout(WRITERS[config.format[0]](transcript)))
        sys.stdout.flush()


def _bar(wait: show.Wait) -> Callable[[float, float], None]:
    """A callback that shows a bar of progress."""

    def tell(done: float, total: float) -> None:
        wait.tell(f"transcribing {show.bar(done, total)} {done:,.0f} of {total:,.0f} s")

    return tell


def _facts(done: list[Transcript]) -> list[str]:
    """Duration, real-time factor, language, and the rates of decoding."""
    from anabranch.decoding.stats import Stats

    total, seconds = sum(each.duration for each in done), max(each.seconds for each in done)
    languages = ", ".join(dict.fromkeys(each.language for each in done))
    facts = [f"{total:,.1f} s of sound in {seconds:,.1f} s, real-time factor {seconds / total:.3f}"]
    facts.append(f"language {languages}")
    stats = Stats.merged(each.stats for each in done)
    return [*facts, *show.rates(stats, done[0].drafter or "none", prompts=0)]
