"""Build a transformers tokenizer from the fields of a GGUF file.

They are built here because transformers (5.24) supports the pre-tokenisation of a few models only: it does not split
SmolLM's digits, so ``"\\n\\n1."`` gets other ids than in training. SentencePiece vocabularies, which it reads for a few
architectures, become byte-pair encodings of characters whose merges follow from the scores of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from anabranch.errors import FileError, ModelError
from anabranch.model.text import foreign_errors
from anabranch.support.jsonfiles import shown

__all__ = ["build_tokenizer", "end_tokens", "unused_keys"]

Metadata = Mapping[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "▁"  # in SentencePiece vocabularies

# Keys of end tokens, and the texts of tokens that end a text in every file, as in llama.cpp. Those of the second group
# are also ordinary text, so they end a text only if they are control tokens.
_END_KEYS = (
    *("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id"),
    *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"),
)
_ENDS = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>"),
    *("<|call|>", "<end_of_turn>", "<end_of_utterance>"),
}
_CONTROL_ENDS = {"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"}

# The keys below tokenizer.ggml: supported; without effect on decoding; and refused unless they are off.
_READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", *_END_KEYS),
    *("bos_token_id", "unknown_token_id", "padding_token_id", "add_bos_token", "add_eos_token", "add_space_prefix"),
}
_ROLES = {
    *(f"{role}_token_id" for role in ("seperator", "cls", "mask", "prefix", "suffix", "middle")),
    *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid")),
    "token_type_count",
}
_OFF = (
    *("add_sep_token", "remove_extra_whitespaces", "precompiled_charsmap", "suppress_tokens"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# GPT-4o's words end where lower case is followed by upper case; Mistral's Tekken has neither contractions nor groups of
# digits.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_SPLIT = "|".join((*(word + _CONTRACTION for word in _WORDS), r"\p{N}{1,3}", _OTHERS))
_TEKKEN_SPLIT = "|".join((*_WORDS, r"\p{N}", _OTHERS))

# Values of tokenizer.ggml.pre, grouped by pre-tokenisation.
_GPT2_NAMES = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
_DIGITS_NAMES = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
_LLAMA3_NAMES = {"llama3", "llama-v3", "llama-bpe", "falcon3"}
_QWEN2_NAMES = {"qwen2", "deepseek-r1-qwen"}
_SPLITS: dict[str, str] = {
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3_SPLIT),  # Phi-4, OLMo 2 and Granite 4: merges alone make words
    **dict.fromkeys(_QWEN2_NAMES, _QWEN2_SPLIT),
    "gpt-4o": _GPT4O_SPLIT,  # Phi-4-mini
    "tekken": _TEKKEN_SPLIT,  # Ministral 3
}
# Vocabularies with words that merges do not produce: whole words are looked up before merging.
_WHOLE_WORDS = {*_LLAMA3_NAMES, "tekken"}


def build_tokenizer(path: Path, metadata: Metadata) -> Any:
    """The tokenizer of a GGUF file, including special tokens and the chat template.

    Args:
        path: the file, for messages.
        metadata: its fields by GGUF name.

    Raises:
        FileError: the tokenizer fields are missing or inconsistent.
        ModelError: the tokenizer's type is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    for key in _OFF:
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise _refused(path, metadata, key)

    def damaged(why: str) -> FileError:
        return FileError(f"{path} has an incomplete or damaged tokenizer ({why}); fetch the file again")

    with foreign_errors(damaged):
        if kind == "gpt2":
            tokenizer = _byte_level(path, metadata)
        elif kind == "llama":
            tokenizer = _pieces(metadata)
        else:
            raise ModelError(f"{path} has a tokenizer of type {kind!r}; supported are gpt2 (byte-level) and llama")
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise TypeError("its chat template is not a string")
        if template:
            tokenizer.chat_template = template
    return tokenizer


def end_tokens(metadata: Metadata) -> list[int]:
    """The tokens that end a text or a turn: those that the file names, and those known by their text.

    The first is the file's end of text.
    """
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    ids = [token for value in named for token in (value if isinstance(value, list) else [value]) if token is not None]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    for token, text in enumerate(metadata["tokenizer.ggml.tokens"]):
        special = token >= len(types) or types[token] in (_CONTROL, _USER_DEFINED)
        if text in _ENDS or (special and text in _CONTROL_ENDS):
            ids.append(token)
    return list(dict.fromkeys(ids))


def unused_keys(metadata: Metadata) -> Iterable[str]:
    """The keys of a file that are not supported and do not change the model."""
    for key in metadata:
        name = key.removeprefix("tokenizer.ggml.")
        if key.startswith("general.sampling.") or (name != key and name not in {*_READ, *_ROLES, *_OFF}):
            yield key


def _refused(path: Path, metadata: Metadata, key: str) -> ModelError:
    key = f"tokenizer.ggml.{key}"
    return ModelError(
        f"{path} sets {key} to {shown(metadata[key])}, which is not supported; load the model's safetensors folder "
        "instead"
    )


def _pieces(metadata: Metadata) -> Any:
    """The tokenizer of a SentencePiece vocabulary: characters, of which the pair with the best score is merged first.

    Spaces are written as ``_SPACE``, one is put before each text if the file says so, as llama.cpp does, and characters
    without a piece become bytes.
    """
    types = _types(metadata)
    tokens = [
        token.replace(_SPACE, " ") if kind == _USER_DEFINED else token
        for token, kind in zip(metadata["tokenizer.ggml.tokens"], types, strict=True)
    ]
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    named, vocabulary = _named_tokens(metadata, tokens), {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges({token: scores[token] for token in tokens if token in normal}),
        unk_token=named.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    architecture = metadata["general.architecture"]
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", not architecture.startswith("gemma"))
    backend, spaces = Tokenizer(model), normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return _finished(backend, metadata, tokens, begins=True, normalized=not prefixed)


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best score first, then the longest first part, as in Hugging Face."""
    merges = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            first, second = piece[:cut], piece[cut:]
            if first in scores and second in scores:
                merges.append((-score, -cut, -len(second), first, second))
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


def _byte_level(path: Path, metadata: Metadata) -> Any:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2" if metadata["general.architecture"] == "gpt2" else None)
    whole_words = pre in _WHOLE_WORDS
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    backend.pre_tokenizer = _split(pre)
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        if pre not in _GPT2_NAMES:
            raise _refused(path, metadata, "add_space_prefix")
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    if pre in _QWEN2_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, metadata, tokens, begins=whole_words)


def _types(metadata: Metadata) -> list[int]:
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    return types or [_NORMAL] * len(metadata["tokenizer.ggml.tokens"])


def _finished(
    backend: Tokenizer, metadata: Metadata, tokens: list[str], *, begins: bool, normalized: bool = False
) -> Any:
    """The tokenizer of a backend, with special tokens, and those that begin and end a text.

    begins      a text has a first token where the file does not say so
    normalized  words of the user's are found in the normalised text
    """
    architecture, types = metadata["general.architecture"], _types(metadata)
    # as in llama.cpp, which drops spaces after them
    stripped = {"phi3": frozenset(tokens) - {"<unk>", "<s>", "<|endoftext|>"}}.get(architecture, frozenset())
    added: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, types, strict=False):
        if kind in added:
            strip = kind == _CONTROL and token in stripped
            special = kind == _CONTROL
            added[kind].append(AddedToken(token, special=special, normalized=normalized and not special, rstrip=strip))
    backend.add_special_tokens(added[_CONTROL])
    backend.add_tokens(added[_USER_DEFINED])
    named = _named_tokens(metadata, tokens)
    bos, eos = named.get("bos_token"), named.get("eos_token")
    before = [bos] if bos and metadata.get("tokenizer.ggml.add_bos_token", begins) else []
    after = [eos] if eos and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", "$B", *after],
            special_tokens=[(token, tokens.index(token)) for token in (*before, *after)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(backend),
        clean_up_tokenization_spaces=False,
        model_max_length=int(metadata[f"{architecture}.context_length"]),
        **named,
    )


class _Uncopied:
    """A backend that transformers uses as it is: it takes a deep copy, 0.5 seconds for 150,000 tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self._backend


def _named_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
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
    if pre in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join(sorted(_GPT2_NAMES | _DIGITS_NAMES | set(_SPLITS)))
    raise ModelError(f"the GGUF file uses the pre-tokenizer {pre!r}; supported are {known}")
