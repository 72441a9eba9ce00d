"""PyTorch with its own defaults, independent of the settings of the calling program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["in_plain_torch", "plain_torch"]

P = ParamSpec("P")
T = TypeVar("T")
CPU = torch.device("cpu")
KINDS = ("cpu", "cuda")  # devices whose operations may be autocast


def plain_torch() -> AbstractContextManager[None]:
    """A context in which new tensors are float32 on the CPU by default, and no operation is autocast.

    A program's default device, default dtype or autocast would change a model's results, or make its tensors empty
    (``meta``). Nothing is entered unless it is needed, since a default device slows every operation.
    """
    autocast = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    if not autocast and torch.get_default_dtype() == torch.float32 and torch.get_default_device() == CPU:
        return nullcontext()
    return _plain(autocast)


@contextmanager
def _plain(autocast: list[str]) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device(CPU), ExitStack() as stack:
            for kind in autocast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_default_dtype(before)


def in_plain_torch(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs in ``plain_torch``."""

    @wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> T:
        with plain_torch():
            return function(*arguments, **options)

    return run
