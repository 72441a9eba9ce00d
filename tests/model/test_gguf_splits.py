"""Tokenizers of GGUF files give the ids of the original on hard strings: one trained per pre-tokenisation."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from anabranch.model.gguf_tokenizer import _split, build_tokenizer

CORPUS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs' tails; it'll SLEEP, camelCaseNames and HTTPServers.",
    "def f(x):\n    return [y**2 for y in x if y != 3.14]  # comment\n\n\n\tif x:\r\n\t\tpass\n",
    "東京は日本の首都です。 한국어 텍스트 и русский текст, ελληνικά, عربى, עברית, ไทย",
    "emoji 🙂🙃 👩‍👩‍👧‍👦 🇫🇷 and e\u0301 combining, naïve café ﬁ ½ ² Ⅷ ǅ",
    "   leading, trailing   \n \n  runs      of     spaces\u00a0nbsp\u3000wide\u200b",
    "it's I'm we'd they'LL you'Re 'Tis rock'n'roll path/to//file.txt\n/\n 1 22 333 4444 1,234,567.89",
    "",
    " ",
    "\n",
    "<|end|>text<|end|> <|end|>",
]
# as published in the tokenizer.json of each family (Split with a pattern, then bytes)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": LLAMA3,
    "dbrx": LLAMA3,
    "smaug-bpe": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
    "gpt-4o": GPT4O,
    "tekken": TEKKEN,
    "gpt-2": None,
    "smollm": None,
    "refact": None,
}


def original(pre: str) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on the corpus with the pre-tokenisation of a family."""
    made, pattern = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken"))), PATTERNS[pre]
    if pattern is not None:
        by_pattern = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        parts = [by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [] if pre == "gpt-2" else [pre_tokenizers.Digits(individual_digits=True)]
        parts = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS * 3, trainer)
    made.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return made


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """The keys of its GGUF file, as llama.cpp's converter writes them."""
    import json

    described = json.loads(tokenizer.to_str())["model"]
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in described["merges"]]
    return {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [word for word, _ in words],
        "tokenizer.ggml.token_type": [3 if word == "<|end|>" else 1 for word, _ in words],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("pre", PATTERNS)
def test_hard_strings_have_the_ids_of_the_original(pre: str, tmp_path: Any) -> None:
    theirs = original(pre)
    ours = build_tokenizer(tmp_path / "toy.gguf", metadata_of(theirs, pre))
    for text in (*CORPUS, "".join(CORPUS)):
        assert ours(text).input_ids == theirs.encode(text).ids, text
        if pre != "qwen2":  # whose text is normalised
            assert ours.decode(ours(text).input_ids) == text


def test_the_splits_differ_where_their_families_do() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        return [piece for piece, _ in _split(pre).pre_tokenize_str(text)]

    assert pieces("gpt-4o", "camelCase's 1234") == ["camel", "Case's", "Ġ", "123", "4"]
    assert pieces("tekken", "camelCase's 12") == ["camel", "Case", "'s", "Ġ", "1", "2"]
    assert pieces("dbrx", "camelCase's 1234") == ["camelCase", "'s", "Ġ", "123", "4"]
