"""economize: prompt lookup with its own decoding loop, on a model loaded by transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .transformers import Transformers
from .wire import Request, serve, versions


class Economize(Transformers):
    """The same call of ``generate``, which economize replaces. Sampling requires its verifier for sampled drafts."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        economize, lookup = import_module("economize"), import_module("economize.techniques.lookup")
        self.model: Any = economize.apply(self.model, lookup.LookupConfig())
        self.length = {"cycle_length": request["tokens"] + 1} if "tokens" in request else {}
        self.config: Any = economize.DecodeConfig
        self.info["versions"] |= versions("economize")

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """Decode one prompt."""
        sampled = {"verifier": "rejection"} if request["temperature"] > 0 else {}
        self.options["decoding"] = self.config(**self.length, **sampled)
        return super().decode(request)


if __name__ == "__main__":
    serve(Economize)
