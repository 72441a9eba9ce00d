"""Text over tokens: whole characters, stop strings, and results that equal decoding all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.generation import Detokenizer


class Bytes:
    """A tokenizer whose tokens are single bytes, so that characters are split over tokens; 255 is special."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(i for i in ids if i != 255).decode("utf-8", errors="replace")


def _feed(text: str, *, size: int, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Bytes(), stop)
    ids = list(text.encode())
    chunks = [detokenizer.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    chunks.append(detokenizer.finish())
    return chunks, detokenizer


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_never_half_a_character(size: int) -> None:
    text = "naïve — 日本語 🚣 end"
    chunks, detokenizer = _feed(text, size=size)
    assert "".join(chunks) == text == detokenizer.text
    assert not any("�" in chunk for chunk in chunks)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_ends_the_text_inside_a_step(size: int) -> None:
    chunks, detokenizer = _feed("one two STOP three", size=size, stop=("STOP",))
    assert "".join(chunks) == "one two "
    assert detokenizer.stopped
    assert detokenizer.kept == len("one two STOP")


def test_what_may_become_a_stop_string_is_held_back_and_given_at_the_end() -> None:
    chunks, detokenizer = _feed("a ST", size=1, stop=("STOP",))
    assert chunks == ["a", " ", "", "", "ST"]
    assert not detokenizer.stopped


def test_the_earliest_of_several_stop_strings_counts() -> None:
    chunks, _ = _feed("x yy zz", size=7, stop=("zz", "yy"))
    assert "".join(chunks) == "x "


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.add([104, 105, 255]) + detokenizer.finish() == "hi"
    assert detokenizer.kept == 3
