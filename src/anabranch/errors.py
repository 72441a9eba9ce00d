"""The package's errors and warnings. Each message is one sentence that says what is wrong and what to do.

    AnabranchError
    +-- InputError        an invalid argument, option or prompt (also a ValueError)
    +-- CapabilityError   an unsupported combination of target, drafter, sampling and device
    +-- FileError         a file or folder that is missing, truncated, modified or malformed
    |   +-- AdapterError  an adapter that does not fit the target
    +-- ModelError        an unsupported model family or weight layout
    +-- FetchError        a failed download
    +-- DeviceError       a device that is missing or out of memory
    +-- NumericsError     logits that are not finite: weights or activations overflow

Programming mistakes inside the package stay ``AssertionError``; nothing is caught to hide them.

Warnings are for what works, but not as well as it could. The command line prints each as one line on standard error.

    AnabranchWarning
    +-- ModelWarning         a model's files contain something that is not used; the message names it
    +-- PerformanceWarning   slower than possible on this machine; the message says why and what to do
    +-- TrainingWarning      training that is unlikely to succeed; the message says what to change
"""

from __future__ import annotations

__all__ = [
    "AdapterError",
    "AnabranchError",
    "AnabranchWarning",
    "CapabilityError",
    "DeviceError",
    "FetchError",
    "FileError",
    "InputError",
    "ModelError",
    "ModelWarning",
    "NumericsError",
    "OutOfMemoryError",
    "PerformanceWarning",
    "TrainingWarning",
    "one_line",
]


class AnabranchError(Exception):
    """The base class of all errors that the package raises for users."""


class InputError(AnabranchError, ValueError):
    """An invalid argument, option or prompt."""


class CapabilityError(AnabranchError):
    """An unsupported combination; the message says what to use instead."""


class FileError(AnabranchError):
    """A file that is missing, truncated, modified or malformed."""


class AdapterError(FileError):
    """An adapter that is broken or belongs to another target."""


class ModelError(AnabranchError):
    """An unsupported model family or weight layout."""


class FetchError(AnabranchError):
    """A failed download."""


class DeviceError(AnabranchError):
    """A device that does not exist or is out of memory."""


class OutOfMemoryError(DeviceError):
    """Memory that does not suffice; the message says how much is needed and how much is free."""


class NumericsError(AnabranchError):
    """Logits of the target that are not finite."""


class AnabranchWarning(UserWarning):
    """The base class of the package's warnings."""


class ModelWarning(AnabranchWarning):
    """A model's files contain something that is not used."""


class PerformanceWarning(AnabranchWarning):
    """Slower than possible on this machine; the message says why and what to do."""


class TrainingWarning(AnabranchWarning):
    """Training that is unlikely to succeed; the message says what to change."""


def one_line(error: BaseException, longest: int = 160) -> str:
    """The message of another library's error in one line of limited length, for use in our messages."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
