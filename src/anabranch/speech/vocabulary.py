"""The special tokens of a Whisper model, by their roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.errors import InputError, ModelError
from anabranch.speech.options import Task
from anabranch.support.nearest import hint

__all__ = ["Vocabulary"]

TIME = 0.02  # seconds between two timestamps
CODES = 3  # letters of the longest code of a language
ENGLISH = 50_256  # the end token of models of English only: GPT-2's. Their tokenizers have languages too


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of a Whisper model.

    languages        the token of each language by its code; empty for a model of English only
    first_timestamp  that of 0.00 s; each later one is 0.02 s later. Tokens below ``end`` are text
    """

    end: int
    start: int
    previous: int
    no_speech: int
    no_timestamps: int
    tasks: dict[str, int]
    languages: dict[str, int]

    @staticmethod
    def of(tokenizer: Any, size: int) -> Vocabulary:
        """The special tokens of a tokenizer. Raises ModelError if it is not Whisper's."""
        ids = tokenizer.get_added_vocab()

        def token(*names: str) -> int:
            number = next((ids[f"<|{name}|>"] for name in names if f"<|{name}|>" in ids), None)
            if number is None:
                raise ModelError(f"the tokenizer has no token <|{names[0]}|>, so the model is not Whisper")
            return int(number)

        tasks = {name: token(name) for name in ("transcribe", "translate")}
        between = range(token("startoftranscript") + 1, min(tasks.values()))
        languages = {name[2:-2]: number for name, number in sorted(ids.items()) if number in between}
        languages = {code: number for code, number in languages.items() if code.isalpha() and len(code) <= CODES}
        end = token("endoftext")
        start, previous, last = token("startoftranscript"), token("startofprev"), token("notimestamps")
        if last + 1 >= size:
            raise ModelError(f"the tokenizer has more tokens than the model's {size}; copy that of the model")
        silent = token("nospeech", "nocaptions")
        return Vocabulary(end, start, previous, silent, last, tasks, {} if end == ENGLISH else languages)

    @property
    def first_timestamp(self) -> int:
        """The token of 0.00 s."""
        return self.no_timestamps + 1

    def code(self, language: str) -> str:
        """The code of a language given by code or by name. Raises InputError."""
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        given = language.strip().lower()
        code = TO_LANGUAGE_CODE.get(given, given)
        if code in (self.languages or ("en",)):
            return str(code)
        if not self.languages:
            raise InputError(f"the model knows English only, got the language {language!r}; use a multilingual model")
        names = (*self.languages, *TO_LANGUAGE_CODE)
        raise InputError(f"the language {language!r} is not one of the model's{hint(given, names)}; give a code as en")

    def prompt(self, language: str, task: Task, before: Sequence[int] = (), *, timestamps: bool = True) -> list[int]:
        """The tokens that a window's text follows: the text before it, the start, language and task."""
        kind = [self.languages[language], self.tasks[task]] if self.languages else []
        first = [self.previous, *before] if before else []
        return [*first, self.start, *kind, *([] if timestamps else [self.no_timestamps])]

    def text(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that are text."""
        return [token for token in tokens if token < self.end]

    def seconds(self, token: int) -> float:
        """The time of a timestamp, from the beginning of its window."""
        return (token - self.first_timestamp) * TIME
