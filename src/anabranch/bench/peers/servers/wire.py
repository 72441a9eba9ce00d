"""The loop of every server: a line in, a line out. The standard library only."""

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
    """What a server wraps; ``info`` says what was loaded."""

    info: dict[str, Any]

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """New token ids, seconds of the engine's own call, and seconds to the first token where it can be told."""


class Times:
    """A streamer in the manner of transformers that keeps when tokens arrived: the prompt comes first, then tokens."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self._begun = False

    def put(self, tokens: Any) -> None:
        """Called with the prompt, then with new tokens."""
        if self._begun:
            self.at.append(time.perf_counter())
        self._begun = True

    def end(self) -> None:
        """Called after the last token."""


def versions(*projects: str) -> dict[str, str]:
    """The installed versions, and Python's."""
    found = {"python": platform.python_version()}
    for project in projects:
        try:
            found[project] = version(project)
        except PackageNotFoundError:
            found[project] = "not installed"
    return found


def serve(load: Callable[[Request], Engine]) -> None:
    """Answer requests until told to quit, or until nobody is there to ask.

    Engines print as they like: what they write to standard output goes to standard error, and the wire is elsewhere.
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
    """Several prompts at a time, where the engine has ``batch``: new token ids, seconds, and seconds to each step."""
    if not hasattr(engine, "batch"):
        raise NotImplementedError("this server decodes one prompt at a time")
    ids, seconds, steps = engine.batch(request)
    return {"ids": ids, "seconds": seconds, "step_seconds": steps}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _peak() -> int | None:
    """The most memory that this process has had, in bytes; getrusage would count the parent before the start."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
