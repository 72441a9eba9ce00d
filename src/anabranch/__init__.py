"""anabranch: decode language models faster without changing their output.

import anabranch
model = anabranch.load("default")
print(model.generate("The river forks and", max_new_tokens=64).text)
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from anabranch.errors import (
    AdapterError,
    AnabranchError,
    AnabranchWarning,
    CapabilityError,
    DeviceError,
    FetchError,
    FileError,
    InputError,
    ModelError,
    ModelWarning,
    PerformanceWarning,
)

if TYPE_CHECKING:
    from anabranch.api import Model, load
    from anabranch.bench.inprocess import BenchResult, bench
    from anabranch.capabilities import Support, supports
    from anabranch.decoding.generation import Chunk, Generation
    from anabranch.decoding.stats import Stats
    from anabranch.methods import load_plugin, register
    from anabranch.speech.transcripts import Transcript

__version__ = "0.1.0"
__all__ = [
    "AdapterError",
    "AnabranchError",
    "AnabranchWarning",
    "BenchResult",
    "CapabilityError",
    "Chunk",
    "DeviceError",
    "FetchError",
    "FileError",
    "Generation",
    "InputError",
    "Model",
    "ModelError",
    "ModelWarning",
    "PerformanceWarning",
    "Stats",
    "Support",
    "Transcript",
    "__version__",
    "bench",
    "load",
    "load_plugin",
    "register",
    "supports",
]

_HOMES = {
    "BenchResult": "bench.inprocess",
    "Model": "api",
    "bench": "bench",
    "load": "api",
    "load_plugin": "methods",
    "register": "methods",
    "Support": "capabilities",
    "supports": "capabilities",
    "Chunk": "decoding.generation",
    "Generation": "decoding.generation",
    "Stats": "decoding.stats",
    "Transcript": "speech.transcripts",
}


logging.getLogger("anabranch").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    # torch is heavy: `anabranch --help` and error handling do without it
    if name in _HOMES:
        from importlib import import_module

        if name == "bench":  # a package that can be called
            return import_module("anabranch.bench")
        return getattr(import_module(f"anabranch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
