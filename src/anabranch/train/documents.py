"""Texts as token ids, one document at a time: what tables are built from (``drafting.tables``).

A file of any size is read in pieces, so memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import FileError, InputError
from anabranch.model.load import Target
from anabranch.model.text import encode, foreign_errors
from anabranch.support.jsonfiles import has_rows, open_text, read_rows
from anabranch.train.data import completion_of, text_of
from anabranch.train.job import check_answers, check_data

__all__ = ["read_documents"]

PIECE = 1 << 16  # characters of a text that are encoded at a time
TOGETHER = 64  # pieces that a tokenizer is given at a time: a fast one uses all cores
CONTEXT = 8  # tokens of a prompt that go before its completion


def read_documents(
    target: Target, *, answers: Path | None = None, text: Path | None = None
) -> Iterator[NDArray[np.int64]]:
    """The token ids [n] of the documents of a file; give exactly one of the two.

    answers  completions (``anabranch train answers``), each with the end of its prompt before it
    text     a file of rows with a field ``text``, or any other file as one text, which is cut at ends of lines

    Checks that the file exists at once; raises FileError for a malformed line or another target's completions as they
    are met.
    """
    check_data(answers, text)
    if answers is not None:
        check_answers(answers, target)
        return _completions(answers, target.config.vocab_size)
    assert text is not None
    return _encoded(target.tokenizer, _rows(text) if has_rows(text) else _pieces(text))


def _completions(path: Path, vocab_size: int) -> Iterator[NDArray[np.int64]]:
    for number, record in read_rows(path):
        prompt, answer, _, _ = completion_of(number, record, path, vocab_size)
        yield np.array([*prompt[-CONTEXT:], *answer], np.int64)


def _rows(path: Path) -> Iterator[str]:
    return (text_of(number, record, path)[0] for number, record in read_rows(path))


def _pieces(path: Path) -> Iterator[str]:
    try:
        with open_text(path) as file:
            while piece := file.read(PIECE):
                yield piece + file.readline(PIECE)
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read as UTF-8 text ({error.reason}); give a text file in UTF-8") from error
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror}); copy it again") from error


def _encoded(tokenizer: Any, texts: Iterator[str]) -> Iterator[NDArray[np.int64]]:
    """Texts as token ids without the tokens that a tokenizer puts around a text."""
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= TOGETHER * PIECE:
            yield from _batch(tokenizer, batch)
            batch, held = [], 0
    yield from _batch(tokenizer, batch)


def _batch(tokenizer: Any, texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    if not texts:
        return
    if not getattr(tokenizer, "is_fast", False):
        encoded = [encode(tokenizer, text, add_special_tokens=False) for text in texts]
    else:
        with foreign_errors(lambda why: InputError(f"the tokenizer does not take this text ({why}); give another")):
            encoded = tokenizer(
                list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
            )["input_ids"]
    for ids in encoded:
        yield np.array(ids, np.int64)
