"""The errors that users see. Each message is one sentence that says what is wrong and what to do.

    AnabranchError
    +-- InputError        an argument or a prompt that cannot be used (also a ValueError)
    +-- CapabilityError   a combination of target, drafter, sampling and device that is not supported
    +-- FileError         a file or folder that is missing, truncated, tampered with or malformed
    |   +-- AdapterError  an adapter that does not fit the target
    +-- ModelError        a model family or weight layout that is not known
    +-- FetchError        something that could not be downloaded
    +-- DeviceError       a device that is missing or out of memory
    +-- NumericsError     scores that are not finite numbers: weights or activations that overflow

Programming mistakes inside the package stay ``AssertionError``; nothing is caught to hide them.

What works, but not as well as it could, is a warning. The command line prints each as one line on standard error.

    AnabranchWarning
    +-- PerformanceWarning   slower than it could be here; the message says why and what to do
    +-- TrainingWarning      a training that will not, or does not, learn what it could; the message says what to change
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
    "NumericsError",
    "PerformanceWarning",
    "TrainingWarning",
    "one_line",
]


class AnabranchError(Exception):
    """Base of every error that the package raises for a user's situation."""


class InputError(AnabranchError, ValueError):
    """An argument, option or prompt that cannot be used."""


class CapabilityError(AnabranchError):
    """A combination that is not supported; the message names what to use instead."""


class FileError(AnabranchError):
    """A file that is missing, truncated, tampered with or malformed."""


class AdapterError(FileError):
    """An adapter that is broken or belongs to another target."""


class ModelError(AnabranchError):
    """A model family or a weight layout that is not known."""


class FetchError(AnabranchError):
    """Something that could not be downloaded."""


class DeviceError(AnabranchError):
    """A device that does not exist or has no memory left."""


class NumericsError(AnabranchError):
    """Scores of the target that are not finite numbers."""


class AnabranchWarning(UserWarning):
    """Base of every warning of the package."""


class PerformanceWarning(AnabranchWarning):
    """Slower than it could be here; the message says why and what to do."""


class TrainingWarning(AnabranchWarning):
    """A training that will not, or does not, learn what it could; the message says what to change."""


def one_line(error: BaseException, longest: int = 160) -> str:
    """What an error of another library says, as part of one of our sentences: one line, not endless."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
