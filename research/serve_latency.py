"""Latencies of a server: what HTTP adds to the Python API, and how long a short prompt waits behind a long one.

    python research/serve_latency.py overhead --data DIR --suite spec_bench:40 --out benchmarks/serve-overhead-...json
    python research/serve_latency.py behind --tokens 7000 --out benchmarks/serve-behind-...json

overhead  The same greedy answers of one model by ``model.chat_stream`` and by a stream of its server, prompt by prompt
          in turns, the API twice (``api`` and ``again``). The server runs in this process, so that both decode with
          the same weights in the same memory; its client is another process. Nothing is kept of earlier prompts.
behind    A short prompt is sent while the server reads a long one, at a random moment, and by itself; nothing is kept.

The client shares the model's cores. TTFT is the time from the call to the first text.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import anabranch
from anabranch.api import Model
from anabranch.errors import InputError
from anabranch.serve.app import create_app
from anabranch.serve.run import bound
from anabranch.serve.settings import Settings
from measured import result_options, write_measured
from serve_load import CHAT, PATIENCE, Answer, answer_of, ask, body_of, prompts_of, quantiles, say, started

PAUSE = 0.3  # seconds between two answers: threads of the last one may still spin
SHORT = "Name three rivers."
WORDS = "The river divides above the town, and its branches meet again below the mill. "  # of the long prompt


def by_api(model: Model, prompt: str, new: int) -> Answer:
    """Stream one greedy answer from Python."""
    answer, began = Answer(), time.perf_counter()
    with closing(
        model.chat_stream(
            [{"role": "user", "content": prompt}],
            max_new_tokens=new,
            temperature=0.0,
            drafter=str(model.spec_of_several),
        )
    ) as chunks:
        for chunk in chunks:
            now = time.perf_counter() - began
            if chunk.text:
                answer.first, answer.end = answer.first or now, now
            answer.tokens += len(chunk.token_ids)
    return answer


@contextmanager
def served(model: Model) -> Iterator[str]:
    """Serve a model in a thread of this process; yields the address."""
    with bound(Settings(port=0)) as listening:
        listening.listen()  # connections wait for the thread
        app = create_app(model, Settings(prefix_memory=0))
        kept = int(PATIENCE)  # the client's connection stays open while the API decodes
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_keep_alive=kept))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def overhead(args: argparse.Namespace, options: str) -> dict[str, Any]:
    """Measure both, prompt by prompt."""
    prompts = prompts_of(args)
    spawning = multiprocessing.get_context("spawn")
    with (
        anabranch.load(args.model) as model,
        served(model) as address,
        ProcessPoolExecutor(1, mp_context=spawning) as client,
    ):
        ways: dict[str, Callable[[str], Answer]] = {
            "api": lambda prompt: by_api(model, prompt, args.new),
            "http": lambda prompt: client.submit(by_http, address, prompt, args.new).result(),
            "again": lambda prompt: by_api(model, prompt, args.new),
        }
        answers: dict[str, list[Answer]] = {way: [] for way in ways}
        rng = random.Random(0)
        for number, prompt in enumerate([prompts[0], *prompts]):
            for way in rng.sample(list(ways), len(ways)):
                time.sleep(PAUSE)
                answer = ways[way](prompt)
                if answer.failed:
                    raise InputError(f"{way} did not answer {prompt[:60]!r}: {answer.failed}")
                if number:  # the first one warms
                    answers[way].append(answer)
    lengths = {way: [answer.tokens for answer in each] for way, each in answers.items()}
    if len({tuple(each) for each in lengths.values()}) > 1:
        raise InputError(f"the answers have other lengths: {lengths}")
    return {way: compared(answers[way], answers["api"]) for way in ways}


@cache
def connected(address: str) -> http.client.HTTPConnection:
    """The connection of this process to a server."""
    return http.client.HTTPConnection(address, timeout=PATIENCE)


def by_http(address: str, prompt: str, new: int) -> Answer:
    """Stream one greedy answer from a server. Its events are taken as they come and parsed in the end."""
    connection, body = connected(address), body_of("claude-any", prompt, new)
    pieces, began = list[tuple[float, bytes]](), time.perf_counter()
    connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while piece := response.read1():
        pieces.append((time.perf_counter() - began, piece))
    if response.status != 200:
        return Answer(failed=f"status {response.status}: {b''.join(piece for _, piece in pieces)[:200]!r}")
    return answer_of(lines_of(pieces))


def lines_of(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """The lines of a text that came in pieces, with the times of their ends."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from ((at, line.decode()) for line in lines)


def compared(answers: Sequence[Answer], base: Sequence[Answer]) -> dict[str, Any]:
    """The speed of some answers and how it compares with the same answers in another way, prompt by prompt."""
    tokens = sum(answer.tokens for answer in answers)
    first = [1e3 * (mine.first - other.first) for mine, other in zip(answers, base, strict=True)]
    rates = [other.end / mine.end for mine, other in zip(answers, base, strict=True)]
    return {
        "requests": len(answers),
        "tokens": tokens,
        "tokens_per_second": round(tokens / sum(answer.end for answer in answers), 2),
        "ttft_ms": quantiles([1e3 * answer.first for answer in answers]),
        "ttft_above_api_ms": quartiles(first),
        "speed_of_api": quartiles(rates),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def behind(args: argparse.Namespace, options: str) -> dict[str, Any]:
    """Send a short prompt at random moments of the reading of a long one, and by itself."""
    with started("server", options, args.model) as url:
        long = long_prompt(url, args.tokens)
        return asyncio.run(_behind(url, long, args.rounds))


def long_prompt(url: str, tokens: int) -> str:
    """A prompt of about so many tokens. Raises InputError if the model has no room for it."""
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        said = client.post("/tokenize", json={"prompt": WORDS * 20}).json()
        if tokens + 200 > said["max_model_len"]:
            raise InputError(f"--tokens {tokens} does not fit the context of {said['max_model_len']}; give fewer")
        return WORDS * (tokens * 20 // int(said["count"]))


async def _behind(url: str, long: str, rounds: int) -> dict[str, Any]:
    rng = random.Random(0)
    alone, late, whole = list[float](), list[float](), list[float]()
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
        for number in range(rounds + 1):
            short = f"{number}. {SHORT}"
            by_itself = await ask(client, url, "claude-any", short, 8)
            reading = asyncio.ensure_future(ask(client, url, "claude-any", f"{number}. {long}", 8))
            await asyncio.sleep(0.3 + rng.random())
            waited = await ask(client, url, "claude-any", short, 8)
            if reading.done():
                raise InputError("the long prompt was read before the short one was answered; give more --tokens")
            read = await reading
            if failed := by_itself.failed or waited.failed or read.failed:
                raise InputError(f"a prompt was not answered: {failed}")
            if number:  # the first one warms
                alone.append(1e3 * by_itself.first)
                late.append(1e3 * waited.first)
                whole.append(1e3 * read.first)
    return {
        "alone": {"ttft_ms": quantiles(alone)},
        "behind": {"ttft_ms": quantiles(late), "most_ms": round(max(late), 1)},
        "long": {"ttft_ms": quantiles(whole)},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in (overhead, behind):
        made = modes.add_parser(mode.__name__, help=mode.__doc__)
        add = made.add_argument
        add("--model", default="default", help="the model")
        result_options(made)
        if mode is overhead:
            add("--suite", default="own", help="prompts: own, spec_bench:40, ...")
            add("--data", type=Path, help="folder with the suites")
            add("--new", type=int, default=128, help="tokens of an answer, at most")
        else:
            add("--tokens", type=int, default=7000, help="of the long prompt")
            add("--rounds", type=int, default=8, help="short prompts that are sent")
    return parser.parse_args()


def main() -> None:
    args = parse()
    modes = {"overhead": overhead, "behind": behind}
    found = write_measured(args, lambda args: {args.mode: modes[args.mode](args, "--prefix-memory 0")})
    say(json.dumps(found[args.mode], indent=1))


if __name__ == "__main__":
    main()
