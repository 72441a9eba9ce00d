"""The main loop of every server: a JSON line in, a JSON line out. Uses only the standard library."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

__all__ = ["Engine", "Request", "Times", "serve", "versions"]

Request = dict[str, Any]


class Engine(Protocol):
    """The engine of a server; ``info`` says what was loaded."""

    info: dict[str, Any]

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """New token ids, seconds of the engine's own call, and seconds to the first token, if known."""


class Times:
    """A streamer for transformers that records the arrival times of tokens; the prompt arrives first."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self._begun = False

    def put(self, tokens: Any) -> None:
        """Called with the prompt, and then with new tokens."""
        if self._begun:
            self.at.append(time.perf_counter())
        self._begun = True

    def end(self) -> None:
        """Called after the last token."""


def versions(*projects: str) -> dict[str, str]:
    """The versions of installed projects and of Python."""
    installed = {"python": platform.python_version()}
    for project in projects:
        try:
            installed[project] = version(project)
        except PackageNotFoundError:
            installed[project] = "not installed"
    return installed


def serve(load: Callable[[Request], Engine]) -> None:
    """Answer requests until a request to quit or the end of the input.

    Replies have their own file descriptor: whatever engines print on standard output is redirected to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    engine: Engine | None = None
    for line in requests:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        reply: dict[str, Any]
        try:
            if request["op"] == "load":
                began = time.perf_counter()
                engine = load(request)
                took = {"load_seconds": round(time.perf_counter() - began, 3), "threads": request["threads"]}
                reply = {"ok": True, "info": {**engine.info, **took, "peak_memory_bytes": _peak()}}
            elif engine is None:
                raise RuntimeError("no model is loaded yet")
            elif request["op"] == "batch":
                reply = {"ok": True, **_batch(engine, request), "peak_memory_bytes": _peak()}
            else:
                ids, seconds, first = engine.decode(request)
                reply = {"ok": True, "ids": ids, "seconds": seconds, "first_token_seconds": first}
                reply["peak_memory_bytes"] = _peak()
        except Exception as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {_first_line(error)}"}
            sys.excepthook(type(error), error, error.__traceback__)
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _batch(engine: Any, request: Request) -> dict[str, Any]:
    """Decode a batch, if the engine has ``batch``: new token ids, seconds, and seconds to each step."""
    if not hasattr(engine, "batch"):
        raise NotImplementedError("this server decodes one prompt at a time")
    ids, seconds, steps = engine.batch(request)
    return {"ids": ids, "seconds": seconds, "step_seconds": steps}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _peak() -> int | None:
    """Peak memory of this process in bytes; getrusage would include the parent's before the start."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
