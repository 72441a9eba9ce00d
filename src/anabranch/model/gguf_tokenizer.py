"""Build a transformers tokenizer from the fields of a GGUF file.

Byte-level BPE tokenizers are built here because transformers (5.23) supports the pre-tokenisation of a few models only:
it does not split SmolLM's digits, so ``"\\n\\n1."`` gets other ids than in training. SentencePiece vocabularies go
through transformers' own conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anabranch.errors import FileError, ModelError
from anabranch.model.text import foreign_errors

__all__ = ["build_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

# Values of tokenizer.ggml.pre by how they split text before the merges.
_GPT2_NAMES = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
_DIGITS_NAMES = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
_LLAMA3_NAMES = {"llama3", "llama-v3", "llama-bpe", "falcon3"}
_QWEN2_NAMES = {"qwen2", "deepseek-r1-qwen"}


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokenizer of a GGUF file, including special tokens and the chat template.

    Args:
        path: the file, from which transformers reads SentencePiece vocabularies.
        metadata: its fields by GGUF name.

    Raises:
        FileError: the tokenizer fields are missing or inconsistent.
        ModelError: the tokenizer's type is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")

    def damaged(why: str) -> FileError:
        return FileError(f"{path} has an incomplete or damaged tokenizer ({why}); fetch the file again")

    with foreign_errors(damaged):
        if kind == "gpt2":
            tokenizer = _byte_level(metadata)
        elif kind == "llama":
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        else:
            raise ModelError(f"{path} has a tokenizer of type {kind!r}; supported are gpt2 (byte-level) and llama")
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise TypeError("its chat template is not a string")
        if template:
            tokenizer.chat_template = template
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Any:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2" if metadata["general.architecture"] == "gpt2" else None)
    # Llama 3 looks up whole words before merging; its vocabulary has words that merges do not produce.
    whole_words = pre in _LLAMA3_NAMES
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    backend.pre_tokenizer = _split(pre)
    if pre in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    named = _named_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", whole_words) and named.get("bos_token"):
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    architecture = metadata["general.architecture"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=int(metadata[f"{architecture}.context_length"]),
        **named,
    )


def _named_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{field}_token_id") for name, field in names.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _split(pre: str | None) -> Any:
    """The pre-tokenizer of a ``tokenizer.ggml.pre`` name. Raises ModelError for an unknown one."""
    if pre in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS_NAMES:
        # digits first: "\n\n1" becomes "\n\n" + "1", where GPT-2's split alone gives "\n" + "\n" + "1"
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre in _LLAMA3_NAMES or pre in _QWEN2_NAMES:
        pattern = _LLAMA3_SPLIT if pre in _LLAMA3_NAMES else _QWEN2_SPLIT
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join(sorted(_GPT2_NAMES | _DIGITS_NAMES | _LLAMA3_NAMES | _QWEN2_NAMES))
    raise ModelError(f"the GGUF file uses the pre-tokenizer {pre!r}; supported are {known}")
