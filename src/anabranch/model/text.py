"""Text to token ids through a model's own tokenizer and chat template, which are files and may hold anything."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anabranch.errors import AnabranchError, InputError, one_line

__all__ = ["encode", "fingerprint", "foreign_errors", "render_chat", "time_limit"]

TEMPLATE_SECONDS = 10.0


@contextmanager
def foreign_errors(explain: Callable[[str], AnabranchError]) -> Iterator[None]:
    """Turn whatever another library raises into an error of ours, which ``explain`` makes of its message.

    The Rust side of tokenizers raises bare Exception and, where it panics, a BaseException that it does not export.
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
    """Raise an exception in the calling thread where its Python code takes longer."""
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
        while fired:  # it arrives at one of the next instructions, and not behind this block
            time.sleep(0.001)
    finally:
        with lock:
            over = True
        timer.cancel()


def encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The token ids of a text. Raises InputError where the tokenizer does not take it."""
    with foreign_errors(lambda why: InputError(f"the tokenizer does not take this text ({why}); give another text")):
        return [int(token) for token in tokenizer.encode(text, **options)]


def fingerprint(tokenizer: Any) -> str:
    """The identity of a tokenizer's vocabulary: SHA-256 in hex of its tokens with their ids. Raises InputError."""
    with foreign_errors(lambda why: InputError(f"the tokenizer does not list its vocabulary ({why})")):
        words = sorted((int(number), str(word)) for word, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], name: str = "this model") -> str:
    """A conversation in the model's chat template, up to where the answer begins. Raises InputError."""

    def refused(why: str) -> InputError:
        return InputError(f"the chat template of {name} refuses this conversation: {why}")

    with foreign_errors(refused), time_limit(TEMPLATE_SECONDS):
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        if not isinstance(text, str):
            raise TypeError("it gives no text")
        return text
