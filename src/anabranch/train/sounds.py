"""Completions of sounds: a Whisper target's own transcripts of windows of 30 s, as training data.

    out  {"id": "/sounds/talk.wav 0", "source": "sounds", "prompt_ids": [...], "answer_ids": [...],
          "sound": {"file": "/sounds/talk.wav", "start": 0, "stop": 3000, "last": false}}

``start`` and ``stop`` are frames of 10 ms, ``last`` marks the last window of a file, and ``source`` is its folder.
Windows are decoded as ``transcribe`` decodes them by default, without drafts. The sounds are read again in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import FileError
from anabranch.methods.none import NoDrafter
from anabranch.model.config import EncoderConfig
from anabranch.model.encoder import Source
from anabranch.model.load import Target
from anabranch.speech.audio import FRAMES_A_SECOND, log_mel, read_audio, window
from anabranch.speech.options import checked
from anabranch.speech.transcripts import transcribe
from anabranch.support.appended import agree, append, begin, records
from anabranch.support.files import check_writable
from anabranch.support.jsonfiles import is_whole
from anabranch.train.answers import AnswerProgress, alone, check_completion

__all__ = ["WindowReader", "found_sounds", "write_transcripts"]

AT_ONCE = 16  # files that are held in memory


def found_sounds(paths: Sequence[Path]) -> list[Path]:
    """The WAV files that paths of files and of folders name. Raises FileError for one that names none."""
    found: list[Path] = []
    for path in paths:
        files = sorted(path.glob("*.wav")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileError(f"there is no sound {path}; give a WAV file or a folder of them")
        found += [file.resolve() for file in files]
    return list(dict.fromkeys(found))


def write_transcripts(
    target: Target,
    sounds: Sequence[Path],
    out: Path,
    *,
    rows: int = 32,
    language: str | None = None,
    report: Callable[[AnswerProgress], None] | None = None,
) -> AnswerProgress:
    """Transcribe the sounds whose windows ``out`` does not have yet and append these; progress counts sounds.

    rows      sounds decoded at a time
    language  None: detected

    Raises FileError if a sound cannot be read, or ``out`` not be written or was written by another target.
    """
    settings = {"fingerprint": target.fingerprint, "language": language}
    check_writable(out, "completions")
    with alone(out):
        agree(out, settings)
        known: set[str] = set()
        finished: set[str] = set()
        for record in records(out, _check, "a window of a sound with id, prompt_ids, answer_ids and sound"):
            known.add(record["id"])
            finished |= {record["sound"]["file"]} if record["sound"]["last"] else set()
        begin(out, settings, "completions")
        todo = [path for path in sounds if str(path) not in finished]
        done, tokens, began = len(sounds) - len(todo), 0, time.monotonic()
        scheduler, options = Scheduler(target.decoder, rows=rows), checked({"language": language, "rows": rows})
        for first in range(0, len(todo), max(rows, AT_ONCE)):
            some = todo[first : first + max(rows, AT_ONCE)]
            made = transcribe(target, scheduler, NoDrafter(), [read_audio(path) for path in some], options)
            for path, transcript in zip(some, made, strict=True):
                for number, each in enumerate(transcript.windows):
                    sound = {"file": str(path), "start": each.start, "stop": each.stop}
                    sound["last"] = number + 1 == len(transcript.windows)
                    ids = {"prompt_ids": each.prompt_ids, "answer_ids": each.token_ids}
                    row = {"id": f"{path} {number}", "source": path.parent.name, **ids, "sound": sound}
                    if row["id"] not in known:
                        append(out, row)
                        tokens += len(each.token_ids)
                done += 1
                if report is not None:
                    report(_progress(done, len(sounds), done - len(sounds) + len(todo), tokens, began))
    return _progress(done, len(sounds), len(todo), tokens, began)


def _progress(done: int, wanted: int, now: int, tokens: int, began: float) -> AnswerProgress:
    taken = max(time.monotonic() - began, 1e-9)
    return AnswerProgress(done, wanted, tokens, tokens / taken, taken / now * (wanted - done) if now else 0.0)


def _check(record: Any) -> None:
    check_completion(record)
    sound = record["sound"]
    if not (isinstance(sound["file"], str) and isinstance(sound["last"], bool) and _frames(sound)):
        raise TypeError


def _frames(sound: Mapping[str, Any]) -> bool:
    start, stop = sound.get("start"), sound.get("stop")
    return isinstance(start, int) and is_whole(start, 0) and is_whole(stop, start + 1)


class WindowReader:
    """Reads the windows that completions are of; holds the features of one file."""

    def __init__(self, target: Target) -> None:
        encoder = target.config.encoder
        assert encoder is not None
        self.encoder: EncoderConfig = encoder
        self._file, self._features = "", Tensor()

    def source(self, record: Mapping[str, Any], where: str) -> Source:
        """The source of a row of completions. Raises FileError that names the row, or the sound."""
        sound = record.get("sound")
        if not (isinstance(sound, dict) and isinstance(sound.get("file"), str) and _frames(sound)):
            raise FileError(
                f"{where} is no window of a sound: it needs a field 'sound' with file, start and stop; write the file "
                "with 'anabranch train answers --sounds'"
            )
        if sound["file"] != self._file:
            self._file, self._features = sound["file"], log_mel(read_audio(sound["file"]), self.encoder.channels)
        if sound["start"] >= self._features.shape[1]:
            raise FileError(
                f"{where} begins at {sound['start'] / FRAMES_A_SECOND:.1f} s, and {sound['file']} is shorter; write "
                "the completions again"
            )
        frames = 2 * self.encoder.layers.max_positions
        return Source(features=window(self._features, sound["start"], sound["stop"], frames).contiguous())
