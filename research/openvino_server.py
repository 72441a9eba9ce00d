"""Serve a model with OpenVINO GenAI's continuous batching, for research/serve_load.py to load beside ours.

OpenVINO GenAI is a library; this gives it as much of OpenAI's interface as a load needs: greedy chat completions as
streams. Run it with the interpreter of the peer's environment (docs/peers.md), after two more packages:

    ~/.cache/anabranch/peers/openvino/bin/python -m pip install starlette uvicorn
    ~/.cache/anabranch/peers/openvino/bin/python research/openvino_server.py MODEL --rows 32 --port 8082

MODEL is a folder that ``optimum-cli export openvino`` wrote; ``anabranch bench --peer openvino`` leaves one in
peers/openvino/exports of the cache folder. Prefixes are kept, as by the servers beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any


class Pipeline:
    """The pipeline, stepped by a thread of its own while requests are open.

    Requests are added between steps, by that thread as well: what a step may not overlap with is not documented.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._genai = import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = args.rows
        scheduler.cache_size = args.cache
        properties = {"INFERENCE_NUM_THREADS": args.threads}
        self._pipe: Any = self._genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
        self.tokenizer: Any = self._pipe.get_tokenizer()
        self._numbers, self._new, self._changed = itertools.count(), list[Any](), threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    async def stream(self, messages: list[dict[str, str]], most: int) -> AsyncIterator[list[int]]:
        """Yield the new tokens of a greedy answer, as the steps produce them."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = most, False
        config.eos_token_id = self.tokenizer.get_eos_token_id()
        config.stop_token_ids = {config.eos_token_id}
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        loop, produced = asyncio.get_running_loop(), asyncio.Queue[list[int] | None]()

        def tell(tokens: list[int] | None) -> None:
            loop.call_soon_threadsafe(produced.put_nowait, tokens)

        with self._changed:
            self._new.append((prompt, config, tell))
            self._changed.notify()
        while (tokens := await produced.get()) is not None:
            yield tokens

    def _run(self) -> None:
        running = list[tuple[Any, Any]]()
        unfinished = self._genai.py_openvino_genai.GenerationStatus.RUNNING
        while True:
            with self._changed:
                while not (running or self._new):
                    self._changed.wait()
                new, self._new = self._new, []
            for prompt, config, tell in new:
                ids = self.tokenizer.encode(prompt, add_special_tokens=False).input_ids
                running.append((self._pipe.add_request(next(self._numbers), ids, config), tell))
            self._pipe.step()
            left = []
            for handle, tell in running:
                while handle.can_read():
                    for output in handle.read().values():
                        tell(list(output.generated_ids))
                if handle.get_status() == unfinished:
                    left.append((handle, tell))
                else:
                    tell(None)
            running = left


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
