"""The options of ``Model.transcribe``, each declared once, as those of a call are (``declared``).

Names and defaults are those of OpenAI's ``transcribe`` where it has them. Importing this module is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, get_args

from anabranch.declared import Option, Specification, allowed, check_each, flag, hints_of, number, one_of, whole
from anabranch.errors import InputError

__all__ = ["SPEECH", "SpeechCall", "SpeechKeywords", "Task", "checked"]

Task = Literal["transcribe", "translate"]
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
ROWS = 4
threshold = number("a finite number", math.isfinite)


def _temperatures(name: str, value: Any) -> None:
    values = [value] if isinstance(value, int | float) else value
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InputError(f"{name} must be a number or a list of them, got {value!r}")
    for each in values:
        number("at least 0, or a list of such numbers", lambda t: 0 <= t < math.inf)(name, each)


class SpeechKeywords(TypedDict, total=False):
    """The options of ``Model.transcribe``; one that is left out has the declared default."""

    language: Annotated[
        str | None,
        Option(
            "expect this language, such as en or german (default: detected)",
            allowed("the name or code of a language", lambda value: isinstance(value, str)),
        ),
    ]
    task: Annotated[
        Task,
        Option(
            "transcribe, or translate to English", one_of(*get_args(Task)), default="transcribe", values=get_args(Task)
        ),
    ]
    timestamps: Annotated[
        bool, Option("write segments with times", flag, default=True, flags=("--timestamps/--no-timestamps",))
    ]
    parallel: Annotated[
        bool,
        Option("cut files at pauses and decode their windows together", flag, default=False, flags=("--parallel",)),
    ]
    condition_on_previous_text: Annotated[
        bool,
        Option("show the text before to the model", flag, default=True, flags=("--previous-text/--no-previous-text",)),
    ]
    initial_prompt: Annotated[
        str, Option("show this text to the model first: names, spellings", default="", metavar="TEXT")
    ]
    temperature: Annotated[
        Sequence[float] | float,
        Option("decode at these temperatures until one fits; repeatable", _temperatures, default=TEMPERATURES),
    ]
    compression_ratio_threshold: Annotated[
        float, Option("try the next temperature for a text that repeats itself more than this", threshold, 2.4)
    ]
    log_prob_threshold: Annotated[
        float, Option("try the next temperature below this mean log probability of a token", threshold, -1.0)
    ]
    no_speech_threshold: Annotated[
        float,
        Option(
            "take an improbable text for silence if the probability of no speech is above this", threshold, default=0.6
        ),
    ]
    seed: Annotated[int, Option("use this random seed at temperatures above 0", whole(0), default=0)]
    drafter: Annotated[str | Specification | None, Option("draft with this method; none: plain decoding")]
    rows: Annotated[int, Option("decode at most this many windows at the same time", whole(1), default=ROWS)]
    on_progress: Annotated[
        Callable[[float, float], None] | None,
        Option("function (seconds of sound done, seconds in total)", allowed("a function", callable)),
    ]


class SpeechCall(SpeechKeywords, total=False):
    """The keyword arguments of ``Model.transcribe``: besides the options, the samples a second of arrays."""

    sampling_rate: int


SPEECH: dict[str, Option] = {name: get_args(hint)[1] for name, hint in hints_of(SpeechKeywords).items()}


def checked(given: Mapping[str, Any]) -> SpeechKeywords:
    """All options, those that were not given with their defaults. Raises InputError."""
    check_each(given, SPEECH)
    values: Any = {name: option.default for name, option in SPEECH.items()} | dict(given)
    if isinstance(values["temperature"], int | float):
        values["temperature"] = (values["temperature"],)
    if not isinstance(values["initial_prompt"], str):
        raise InputError(f"initial_prompt must be a text, got {values['initial_prompt']!r}")
    result: SpeechKeywords = values
    return result
