"""Tokenizers and chat templates of models; they come from files, so any failure becomes an error of ours."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from anabranch.errors import AnabranchError, InputError, one_line

__all__ = [
    "ChatTemplate",
    "clean_up_of",
    "encode",
    "fingerprint",
    "foreign_errors",
    "hidden_ids",
    "render_chat",
    "template_reads",
    "time_limit",
    "token_bytes",
    "tokens_bytes",
]

TEMPLATE_SECONDS = 10.0


@contextmanager
def foreign_errors(explain: Callable[[str], AnabranchError]) -> Iterator[None]:
    """Turn any exception of another library into one of ours, made from its message by ``explain``.

    The Rust code of tokenizers raises Exception and, if it panics, a BaseException that it does not export.
    """
    try:
        yield
    except AnabranchError:
        raise
    except Exception as error:
        raise explain(one_line(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise explain(one_line(error)) from error


class _TimeOutError(Exception):
    def __str__(self) -> str:
        return f"it takes more than {TEMPLATE_SECONDS:.0f} seconds"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise an exception in the calling thread if the block's Python code takes longer."""
    lock, over, fired = threading.Lock(), False, False
    thread = ctypes.c_ulong(threading.get_ident())

    def fire() -> None:
        nonlocal fired
        with lock:
            if not over:
                fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TimeOutError))

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
        with lock:
            over = True
        while fired:  # wait for the exception, so that it is not raised after this block
            time.sleep(0.001)
    finally:
        with lock:
            over = True
        timer.cancel()


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The token ids of a text. Raises InputError if the tokenizer rejects it."""
    with foreign_errors(lambda why: InputError(f"the tokenizer rejects this text ({why}); give another text")):
        return [int(token) for token in tokenizer.encode(text, **options)]


def hidden_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of special tokens, whose text is skipped."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = (int(number) for number, token in added.items() if getattr(token, "special", False))
    return frozenset((*marked, *(getattr(tokenizer, "all_special_ids", None) or ())))


def clean_up_of(tokenizer: Any) -> Callable[[str], str] | None:
    """The function with which the tokenizer's ``decode`` removes spaces; None if it does not, as for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    core = getattr(tokenizer, "backend_tokenizer", None)
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    bpe = type(getattr(core, "model", None)).__name__ == "BPE"
    return None if bpe and not forced else tokenizer.clean_up_tokenization


BASE = "abcdef"  # any text for a token to follow
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token, special or not, adds to a text; empty for an id beyond the vocabulary.

    These are the bytes in which transformers' ``StopStringCriteria`` looks for stop strings.
    """
    return tokens_bytes(tokenizer, [token])[0]


def tokens_bytes(tokenizer: Any, tokens: Sequence[int]) -> list[bytes]:
    """``token_bytes`` of several tokens."""
    names = [tokenizer.convert_ids_to_tokens(int(token)) for token in tokens]
    kind, before = _decoder_kind(tokenizer), ""
    base, encoded = list[str](), list[bytes]()
    for name in names:
        if name is None:
            encoded.append(b"")
        elif kind == "ByteFallback" and (byte := BYTE.fullmatch(name)):
            encoded.append(bytes([int(byte[1], 16)]))
        elif kind == "ByteLevel" and all(letter in _letters() for letter in name):
            encoded.append(bytes(_letters()[letter] for letter in name))
        else:
            if not base:
                base = tokenizer.convert_ids_to_tokens(tokenizer.encode(BASE, add_special_tokens=False))
                before = str(tokenizer.convert_tokens_to_string(base))
            both = str(tokenizer.convert_tokens_to_string([*base, name]))
            encoded.append(both[len(before) :].encode("utf-8", "replace"))
    return encoded


def _decoder_kind(tokenizer: Any) -> str:
    """The tokenizer's spelling of bytes: "ByteLevel", "ByteFallback", or "" for none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return ""
    if type(decoder).__name__ in (kinds := ("ByteLevel", "ByteFallback")):
        return type(decoder).__name__
    state = decoder.__getstate__()
    described = state.decode() if isinstance(state, bytes) else str(state)
    return next((kind for kind in reversed(kinds) if f'"type":"{kind}"' in described.replace(" ", "")), "")


@lru_cache(maxsize=1)
def _letters() -> dict[str, int]:
    """The byte of each letter of byte-level BPE (GPT-2): printable bytes stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def fingerprint(tokenizer: Any) -> str:
    """The identity of a tokenizer's vocabulary: SHA-256 in hex of its tokens with their ids. Raises InputError."""
    with foreign_errors(lambda why: InputError(f"the tokenizer does not list its vocabulary ({why})")):
        words = sorted((int(number), str(word)) for word, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


@dataclass(frozen=True)
class ChatTemplate:
    """Inputs of a chat template in addition to the messages: the arguments of transformers' ``apply_chat_template``.

    tools                   functions, or their JSON schemas
    documents               dictionaries with "title" and "text"
    chat_template           a template, or the name of one of the tokenizer's; None: its own
    continue_final_message  the answer continues the last message; None: no
    variables               other variables of the template, such as ``enable_thinking``
    """

    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    continue_final_message: bool | str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def template_reads(tokenizer: Any, name: str, template: ChatTemplate) -> bool:
    """True if the chat template reads a variable of this name; False without a template, or for one with errors."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None) and template.chat_template is None:
        return False
    try:
        return name in _variables(tokenizer.get_chat_template(template.chat_template, template.tools))
    except (TemplateError, ValueError):
        return False


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    """The variables that a template reads; finding them takes a millisecond or several. Raises TemplateError."""
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return frozenset(find_undeclared_variables(_compile_jinja_template(source).environment.parse(source)))


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str = "this model",
    template: ChatTemplate | None = None,
) -> str:
    """A conversation in the model's chat template, ending where the answer begins or continues. Raises InputError.

    Content parts are joined, as in vLLM, for a template that takes only strings.
    """
    given = template or ChatTemplate()
    resumes = given.continue_final_message or False
    arguments = {name: getattr(given, name) for name in ("tools", "documents", "chat_template")}
    arguments |= {"continue_final_message": resumes or None}
    arguments = {name: value for name, value in arguments.items() if value is not None} | dict(given.variables)

    def refused(why: str) -> InputError:
        return InputError(f"the chat template of {name} refuses this conversation: {why}")

    def rendered(spoken: Sequence[Mapping[str, Any]]) -> str:
        with foreign_errors(refused), time_limit(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(
                list(spoken), add_generation_prompt=not resumes, tokenize=False, **arguments
            )
            if not isinstance(text, str):
                raise TypeError("it does not return a string")
            return text

    joined = [_joined(message) for message in messages]
    if not any(isinstance(message.get("content"), list | tuple) for message in messages):
        return rendered(messages)
    try:
        text = rendered(messages)
    except InputError:
        return rendered(joined)
    printed = any(str(message["content"]) in text for message in messages if isinstance(message.get("content"), list))
    return rendered(joined) if printed else text


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the texts of its content parts in one string."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": "\n".join(part if isinstance(part, str) else str(part["text"]) for part in content)}
