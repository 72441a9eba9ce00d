"""Apply a model's tokenizer and chat template, which come from files and may fail in any way."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anabranch.errors import AnabranchError, InputError, one_line

__all__ = ["encode", "foreign_errors", "render_chat", "time_limit"]

TEMPLATE_SECONDS = 10.0


@contextmanager
def foreign_errors(explain: Callable[[str], AnabranchError]) -> Iterator[None]:
    """Turn any exception of another library into one of ours, which ``explain`` makes from its message.

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
    """Raise an exception in the calling thread if its Python code runs for longer."""
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


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], name: str = "this model") -> str:
    """A conversation in the model's chat template, ending where the answer begins. Raises InputError."""

    def refused(why: str) -> InputError:
        return InputError(f"the chat template of {name} refuses this conversation: {why}")

    with foreign_errors(refused), time_limit(TEMPLATE_SECONDS):
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        if not isinstance(text, str):
            raise TypeError("it does not return a string")
        return text
