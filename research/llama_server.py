"""Serve a GGUF file with llama.cpp's own server, for research/serve_load.py to load beside ours.

Run it with the interpreter of a peer's environment (docs/peers.md), which has the wheel xllamacpp:

    ~/.cache/anabranch/peers/llama.cpp-avx512/bin/python research/llama_server.py MODEL.gguf --rows 32 --port 8081

Requests are decoded together, in one of ``--rows`` slots each with room for ``--capacity`` tokens; prefixes are kept as
llama.cpp keeps them by default.
"""

from __future__ import annotations

import argparse
import signal
from importlib import import_module
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8081)
    args = parser.parse_args()
    xllamacpp = import_module("xllamacpp")
    params: Any = xllamacpp.CommonParams()
    params.model.path = args.model
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.n_ctx = args.rows * args.capacity
    params.n_parallel, params.n_gpu_layers, params.port = args.rows, 0, args.port
    server = xllamacpp.Server(params)
    print(f"serving at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
