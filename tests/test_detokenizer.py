"""Text is the same for every cut of the tokens, with every kind of decoder; stop strings end it as in transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from anabranch.decoding.detokenizer import Detokenizer
from toy_text import VOCABULARY, byte_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xC3, 0xBC, 0xE2, 0x82, 0xAC, 0xFF, 0xF0, 0x9F)]
PIECES = ["▁", "▁the", "▁a", "b", "ü", "▁▁", "st", "op", "▁stop", "n't", "."]
LLAMA = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def tokenizer_of(words: Sequence[str], decoder: Any, kind: str = "WordLevel", **options: Any) -> Any:
    """A tokenizer of some words and two special tokens, with a decoder given as in tokenizer.json."""
    from tokenizers import Tokenizer, models

    vocabulary = {word: i for i, word in enumerate(["<unk>", *words, "abcdef"])}
    model = models.WordLevel(vocabulary, unk_token="<unk>")
    if kind == "WordPiece":
        model = models.WordPiece(vocabulary, unk_token="<unk>")
    described = json.loads(Tokenizer(model).to_str())
    described["decoder"] = decoder
    core = Tokenizer.from_str(json.dumps(described))
    core.add_special_tokens(["<s>", "<|im_end|>"])
    core.add_tokens(["<tool>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", **options)


WORDS = ["the", "##re", "##", ".", "n't", "'", "s", "'s", "ü", "do", "##n't", "not"]
WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
TOKENIZERS = {
    "byte level": byte_tokenizer(),
    "byte fallback": tokenizer_of([*BYTES, *PIECES], {"type": "Sequence", "decoders": LLAMA}),
    "byte fallback alone": tokenizer_of([*BYTES, *PIECES], {"type": "Sequence", "decoders": LLAMA[:3]}),
    "metaspace": tokenizer_of(
        PIECES, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    ),
    "word pieces": tokenizer_of(WORDS, WORDPIECE, "WordPiece"),
    "cleaned": tokenizer_of(WORDS, {**WORDPIECE, "cleanup": False}, clean_up_tokenization_spaces=True),
    "suffixes": tokenizer_of(["the</w>", "a</w>", "b", "ü</w>"], {"type": "BPEDecoder", "suffix": "</w>"}),
    "no decoder": tokenizer_of(["the", "a", "b."], None),
}


def pieces_of(tokenizer: Any, ids: Sequence[int], sizes: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """The texts handed out for groups of tokens of the given sizes, then single ones."""
    detokenizer, pieces, at = Detokenizer(tokenizer, stop), [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(detokenizer.add(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces


IDS = st.lists(st.integers(0, 40), max_size=24)
SIZES = st.lists(st.integers(1, 5), max_size=8)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(ids=IDS, sizes=SIZES)
@example(ids=[1, 8], sizes=[1, 1])  # a valid byte, which an invalid one after it takes along
@example(ids=[12, 23, 12], sizes=[1, 1, 1])  # a special token between words
@example(ids=[19, 39, 12], sizes=[])  # an id beyond the vocabulary
def test_pieces_add_up_to_decoding_at_once(name: str, ids: list[int], sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte level":  # all letters, and bytes beyond ASCII above all
        ids = [token * 7 for token in ids]
    pieces = pieces_of(tokenizer, ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "byte fallback alone", "metaspace", "word pieces"])
@settings(max_examples=200, deadline=None)
@given(ids=IDS, stop=st.lists(st.sampled_from(["stop", " stop", "<|im_end|>", "b<s>", "ü", " a", "A", "\n", "s", "t"])))
def test_stop_strings_end_at_the_token_of_transformers(name: str, ids: list[int], stop: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    known = [token for token in ids if tokenizer.convert_ids_to_tokens(token) is not None]
    try:
        criterion = StopStringCriteria(tokenizer, stop)
    except ValueError:  # transformers refuses none, and strings that no token can end
        return
    kept = len(known)
    for count in range(1, len(known) + 1):
        if bool(criterion(torch.tensor([known[:count]]), None)):
            kept = count
            break
    else:
        count = 0
    detokenizer = Detokenizer(tokenizer, stop)
    text = detokenizer.add(known) + detokenizer.finish()
    assert (detokenizer.kept, detokenizer.stopped is not None) == (kept, count > 0)
    assert text == detokenizer.text
    assert "".join(pieces_of(tokenizer, known, [2, 1], stop)) == text


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (["<|im_end|>"], "the st", 4),
        ([" the"], "", 1),  # it begins at the first character, which the decoder drops
        (["st<|im"], "the ", 4),
        (["the st<|im_end|>op"], "", 5),
        (["op", "stop"], "the st", 5),  # a special token stands within "stop"
        (["e s", "the st"], "", 3),
    ],
)
def test_special_tokens_and_first_characters_in_stop_strings(stop: list[str], text: str, kept: int) -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("▁the", "▁", "st", "<|im_end|>", "op")]
    found = Detokenizer(tokenizer, stop)
    pieces = [found.add([token]) for token in ids]
    assert ("".join(pieces) + found.finish(), found.kept) == (text, kept)


def test_a_character_of_a_stop_string_may_be_followed_by_half_of_another() -> None:
    """The token that completes it also begins another character, so the text is not valid yet."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a€")
    found = Detokenizer(tokenizer, ["a"])
    assert found.add(ids[:2]) == ""
    assert (found.stopped, found.kept) == ("a", 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.integers(1, 6))
def test_a_whole_text_is_that_of_decoding_at_once(ids: list[int], size: int) -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer, whole=True)
    for at in range(0, len(ids), size):
        assert detokenizer.add(ids[at : at + size]) == ""
    assert detokenizer.finish() == detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert detokenizer.kept == len(ids)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12), SIZES)
def test_characters_come_whole(text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "")
    pieces = pieces_of(TOKENIZERS["byte level"], TOKENIZERS["byte level"].encode(text), sizes)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_text_that_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer, ["stop"])
    assert [detokenizer.add(tokenizer.encode(text)) for text in ("no st", "a", "sto")] == ["no ", "sta", ""]
    assert detokenizer.finish() == "sto"
