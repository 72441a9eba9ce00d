"""Transcripts as text, SubRip (SRT), WebVTT and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from anabranch.speech.transcripts import Transcript

__all__ = ["FORMATS"]


def _text(transcript: Transcript) -> str:
    """One line a segment, without times."""
    return "".join(f"{segment.text.strip()}\n" for segment in transcript.segments)


def _srt(transcript: Transcript) -> str:
    cues = [
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_cue(segment.text)}\n"
        for number, segment in enumerate(transcript.segments, 1)
    ]
    return "\n".join(cues)


def _vtt(transcript: Transcript) -> str:
    cues = [
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_escaped(_cue(segment.text))}\n"
        for segment in transcript.segments
    ]
    return "\n".join(("WEBVTT\n", *cues))


def _json(transcript: Transcript) -> str:
    return json.dumps(transcript.to_dict(), ensure_ascii=False) + "\n"


def _time(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    whole = round(1000 * seconds)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def _cue(text: str) -> str:
    """The text of a cue, in which an arrow would begin another one."""
    return text.strip().replace("-->", "->")


def _escaped(text: str) -> str:
    """The text with the characters that begin tags in WebVTT escaped."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


FORMATS: dict[str, Callable[[Transcript], str]] = {"txt": _text, "srt": _srt, "vtt": _vtt, "json": _json}
