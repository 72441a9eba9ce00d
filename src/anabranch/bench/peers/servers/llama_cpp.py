"""llama.cpp's server in this process (the wheel xllamacpp), called through its HTTP interface."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .wire import Request, serve, versions


class LlamaCpp:
    """One slot, no prompt cache. Seconds are those of one request; the time to first token is llama.cpp's own."""

    def __init__(self, request: Request) -> None:
        xllamacpp = import_module("xllamacpp")
        params: Any = xllamacpp.CommonParams()
        params.model.path = request["model"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
        params.n_ctx = request["capacity"] + 8
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cache_prompt = False
        if kind := request["speculative"]:
            _speculate(xllamacpp, params, f"ngram_{request['kind']}" if kind == "ngram" else kind, request)
        self.server: Any = xllamacpp.Server(params)
        self.address = urlsplit(self.server.listening_address)
        self.info: dict[str, Any] = {
            "weights": Path(request["model"]).stem,
            "versions": versions("xllamacpp"),
            "build": xllamacpp.get_system_info().strip(" |"),
        }

    def decode(self, request: Request) -> tuple[list[int], float, float | None]:
        """Decode one prompt."""
        body = json.dumps(
            {
                "prompt": request["ids"],
                "n_predict": request["max_new_tokens"],
                "temperature": request["temperature"],
                "top_k": request["top_k"],
                "top_p": request["top_p"],
                "min_p": 0.0,
                "repeat_penalty": 1.0,
                "seed": request["seed"],
                "samplers": ["top_k", "top_p", "temperature"],
                "cache_prompt": False,
                "return_tokens": True,
            }
        )
        connection = HTTPConnection(self.address.hostname or "127.0.0.1", self.address.port)
        try:
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            seconds = time.perf_counter() - began
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"llama.cpp answered {answer.status}: {text[:200].decode(errors='replace')}")
        reply = json.loads(text)
        return reply["tokens"], seconds, reply["timings"]["prompt_ms"] / 1e3


def _speculate(xllamacpp: Any, params: Any, kind: str, request: Request) -> None:
    """Draft by one of llama.cpp's methods, with its own defaults but for what was asked for."""
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
    if kind == "draft_simple":
        draft = params.speculative.draft
        draft.mparams.path, draft.n_gpu_layers = request["draft"], 0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = request["threads"]
        if "tokens" in request:
            draft.n_max = request["tokens"]


if __name__ == "__main__":
    serve(LlamaCpp)
