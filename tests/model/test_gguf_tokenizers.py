"""Tokenizers of GGUF files give the ids of the original ones, on strings that are hard to split."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer

from anabranch.errors import FileError
from anabranch.model.gguf_tokenizer import build_tokenizer

PIECES = Path(__file__).with_name("pieces.json")
CONTROL = "<s>", "</s>"


@cache
def originals() -> dict[str, Any]:
    """Two SentencePiece models, and their ids of many texts (``make_pieces.py``)."""
    made: dict[str, Any] = json.loads(PIECES.read_text())
    return made


def metadata(name: str, **changes: Any) -> dict[str, Any]:
    """The fields of a file of this vocabulary, as llama.cpp's converter writes them."""
    pieces = originals()[name]["pieces"]
    # which stores words of the user's as they occur in texts
    tokens = [text.replace("▁", " ") if kind == 4 else text for text, _, kind in pieces]
    return {
        "general.architecture": name,
        f"{name}.context_length": 128,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **({} if name == "llama" else {"tokenizer.ggml.add_space_prefix": False}),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def ids_of(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_pieces_are_those_of_sentencepiece(name: str) -> None:
    tokenizer = build_tokenizer(Path("toy.gguf"), metadata(name))
    texts = originals()[name]["texts"]
    assert len(texts) > 150
    special = ("<s>", "</s>", "<unk>")  # special tokens here, ordinary text in SentencePiece
    plain = [(text, ids) for text, ids in texts if not any(word in text for word in special)]
    assert len(plain) > 100
    for text, ids in plain:
        assert ids_of(tokenizer, text) == ids, ascii(text)
        back = tokenizer.decode(ids, skip_special_tokens=False)
        assert back == text.replace("▁", " ")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_special_tokens_in_a_text(name: str) -> None:
    """The text on each side is a text of its own, as in llama.cpp."""
    tokenizer = build_tokenizer(Path("toy.gguf"), metadata(name))
    for one, other in (("hello", "world"), ("a ", " b"), ("", "\n\n"), ("東京", "🙂")):
        ids = [*ids_of(tokenizer, one), 2, *ids_of(tokenizer, other)]
        assert ids_of(tokenizer, f"{one}</s>{other}") == ids
    assert tokenizer("hello").input_ids == [1, *ids_of(tokenizer, "hello")]  # by default, as in llama.cpp
    ended = build_tokenizer(Path("toy.gguf"), metadata(name, add_bos_token=False, add_eos_token=True))
    assert ended("hello").input_ids == [*ids_of(tokenizer, "hello"), 2]


def test_spaces_after_a_turn_of_phi3_are_dropped() -> None:
    fields = {key.replace("llama.c", "phi3.c"): value for key, value in metadata("llama").items()}
    tokenizer = build_tokenizer(Path("toy.gguf"), fields | {"general.architecture": "phi3"})
    assert ids_of(tokenizer, "</s> \n hello") == [2, *ids_of(tokenizer, "hello")]
    assert ids_of(tokenizer, "<s> hello") == [1, *ids_of(tokenizer, " hello")]


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_a_vocabulary_that_lacks_something_is_a_sentence(key: str) -> None:
    fields = metadata("llama")
    fields[f"tokenizer.ggml.{key}"] = fields[f"tokenizer.ggml.{key}"][:-1]
    with pytest.raises(FileError, match="incomplete or damaged tokenizer"):
        build_tokenizer(Path("toy.gguf"), fields)
    without = {name: value for name, value in metadata("llama").items() if not name.endswith("scores")}
    with pytest.raises(FileError, match="incomplete or damaged tokenizer"):
        build_tokenizer(Path("toy.gguf"), without)


@cache
def trained() -> tuple[ByteLevelBPETokenizer, dict[str, int], list[str]]:
    """A byte-level tokenizer of GPT-2's kind, its vocabulary and merges."""
    original = ByteLevelBPETokenizer()
    original.train_from_iterator(hard_texts(), vocab_size=500, min_frequency=2, special_tokens=["<|endoftext|>"])
    saved = json.loads(original._tokenizer.to_str())["model"]
    return original, saved["vocab"], [m if isinstance(m, str) else " ".join(m) for m in saved["merges"]]


def hard_texts() -> list[str]:
    return [text for text, _ in originals()["llama"]["texts"]]


def byte_level(architecture: str, pre: str) -> Any:
    _, vocabulary, merges = trained()
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda entry: entry[1])]
    fields = {
        "general.architecture": architecture,
        f"{architecture}.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return build_tokenizer(Path("toy.gguf"), fields)


def test_byte_level_words_are_those_of_gpt2() -> None:
    original, _, _ = trained()
    tokenizer = byte_level("gpt2", "gpt-2")
    for text in hard_texts():
        assert ids_of(tokenizer, text) == original.encode(text).ids, ascii(text)
        assert tokenizer.decode(ids_of(tokenizer, text)) == text
    assert ids_of(tokenizer, "a<|endoftext|> b") == [*ids_of(tokenizer, "a"), 0, *ids_of(tokenizer, " b")]


def test_byte_level_words_are_those_of_qwen2() -> None:
    from transformers import Qwen2Tokenizer

    _, vocabulary, merges = trained()
    original = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    tokenizer = byte_level("qwen2", "qwen2")
    for text in hard_texts():
        assert ids_of(tokenizer, text) == ids_of(original, text), ascii(text)
