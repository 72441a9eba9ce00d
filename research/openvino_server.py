"""Serve a model with OpenVINO GenAI's continuous batching, so that research/serve_load.py can compare it with ours.

OpenVINO GenAI is a library; this gives it as much of OpenAI's interface as a load needs: greedy chat completions as
streams. Run it with the interpreter of the peer's environment (docs/peers.md), after two more packages:

    ~/.cache/anabranch/peers/openvino/bin/python -m pip install starlette uvicorn
    ~/.cache/anabranch/peers/openvino/bin/python research/openvino_server.py MODEL --rows 32 --port 8082

MODEL is a folder that ``optimum-cli export openvino`` wrote; ``anabranch bench --peer openvino`` leaves one in
peers/openvino/exports of the cache folder. Like the servers it is compared with, it keeps prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import threading
from collections.abc import AsyncIterator
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any


def decode(connection: Connection, args: argparse.Namespace) -> None:
    """Decode requests (number, prompt's tokens, most new tokens, end token) as they come; send what each step makes.

    A process of its own, since a step holds Python's lock, so that other threads would seldom run.
    """
    genai, numpy, openvino = map(import_module, ("openvino_genai", "numpy", "openvino"))
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = args.rows
    scheduler.cache_size = args.cache
    pipe = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads})
    unfinished = genai.py_openvino_genai.GenerationStatus.RUNNING
    running = dict[int, Any]()
    while True:
        while not running or connection.poll():
            number, ids, most, end = connection.recv()
            config = genai.GenerationConfig()
            config.max_new_tokens, config.do_sample = most, False
            config.eos_token_id, config.stop_token_ids = end, {end}
            running[number] = pipe.add_request(number, openvino.Tensor(numpy.array([ids], numpy.int64)), config)
        pipe.step()
        made = list[tuple[int, list[int] | None]]()
        for number, handle in list(running.items()):
            while handle.can_read():
                made += [(number, list(output.generated_ids)) for output in handle.read().values()]
            if handle.get_status() != unfinished:
                made.append((number, None))
                del running[number]
        connection.send(made)


class Pipeline:
    """The pipeline in its process, and the tokenizer in this one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer: Any = import_module("openvino_genai").Tokenizer(args.model)
        self._connection, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=decode, args=(theirs, args), daemon=True)
        process.start()
        self._numbers, self._queues = itertools.count(), dict[int, asyncio.Queue[list[int] | None]]()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out what the pipeline makes."""
        while True:
            for number, tokens in self._connection.recv():
                loop.call_soon_threadsafe(self._queues[number].put_nowait, tokens)

    async def stream(self, messages: list[dict[str, str]], most: int) -> AsyncIterator[list[int]]:
        """Yield the new tokens of a greedy answer, as the steps produce them."""
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).input_ids.data[0].tolist()
        number = next(self._numbers)
        if number == 0:
            threading.Thread(target=self._receive, args=(asyncio.get_running_loop(),), daemon=True).start()
        produced = self._queues[number] = asyncio.Queue()
        self._connection.send((number, ids, most, self.tokenizer.get_eos_token_id()))
        while (tokens := await produced.get()) is not None:
            yield tokens
        del self._queues[number]


def application(pipeline: Pipeline, name: str) -> Any:
    """Return the ASGI application."""
    routing, responses = import_module("starlette.routing"), import_module("starlette.responses")

    async def models(_: Any) -> Any:
        return responses.JSONResponse({"object": "list", "data": [{"id": name, "object": "model"}]})

    async def chat(request: Any) -> Any:
        body = await request.json()
        return responses.StreamingResponse(events(body), media_type="text/event-stream")

    async def events(body: dict[str, Any]) -> AsyncIterator[str]:
        tokens, said = list[int](), ""
        async for more in pipeline.stream(body["messages"], body["max_tokens"]):
            tokens += more
            text = pipeline.tokenizer.decode(tokens)
            if len(text) > len(said) and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character waits
                yield event(choices=[{"index": 0, "delta": {"content": text[len(said) :]}}])
                said = text
        yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        yield event(choices=[], usage={"completion_tokens": len(tokens)})
        yield "data: [DONE]\n\n"

    def event(**parts: Any) -> str:
        return f"data: {json.dumps({'object': 'chat.completion.chunk', 'model': name, **parts})}\n\n"

    routes = [
        routing.Route("/v1/models", models),
        routing.Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    return import_module("starlette.applications").Starlette(routes=routes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32, help="sequences that decode together")
    parser.add_argument("--cache", type=int, default=2, help="GB for keys and values")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=8082)
    args = parser.parse_args()
    pipeline = Pipeline(args)
    import_module("uvicorn").run(application(pipeline, "openvino"), port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
