"""Loads a server for a while as its worst clients would, and checks that everything returns to where it was.

    python scripts/soak_server.py --seconds 3600 --out soak.json
    python scripts/soak_server.py --seconds 300 --model FOLDER

Starts ``anabranch serve`` on a free port of this machine, with a key and kept texts on disk, and sends it the requests
of ``KINDS`` and ``REFUSED``; a third of the clients leave. Memory and open files are read from /proc after a warm-up of
a tenth of the time, and again at the end, when no row may be left. Answers to one prompt, greedy and with a seed, are
compared all along.

Exits with 1 where something leaked, hung or differed.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch

from anabranch.bench.report import environment
from anabranch.support.files import shown_command, write_atomically

PATIENCE = 120.0  # seconds after which an answer counts as hung
PREFIXES = 8  # MiB of kept texts; so few are full after the warm-up, and do not count as growth
GROWTH = 1.15  # of memory after the warm-up, which is no leak: allocators keep pages
COMPLETIONS = "/v1/completions"
KEY = "soak"
HEADERS, JSON = {"x-api-key": KEY}, {"content-type": "application/json"}
MAX_BODY = 100_000  # bytes
BODY_SECONDS = 3
PROBES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "the river", "max_tokens": 12, "temperature": 0, "ignore_eos": True},
    "seeded": {"prompt": "the river", "max_tokens": 12, "temperature": 1, "seed": 7, "ignore_eos": True},
}
# requests for whole answers: a body, and the status that it gets
REFUSED: dict[str, tuple[bytes, int]] = {
    "half a body": (b"{", 400),
    "not UTF-8": (b"\xff", 400),
    "a wrong type": (b'{"prompt": 3}', 400),
    "a wrong model": (b'{"prompt": "x", "model": "none"}', 404),
    "a large body": (b" " * (2 * MAX_BODY), 413),
    "a grammar without a text": (json.dumps({"prompt": "x", "guided_regex": r"a[^\s\S]b"}).encode(), 400),
}
# is built for a second, and is too complex after a few tokens
ENDLESS = json.dumps({"prompt": "x", "guided_grammar": 'start: again\nagain: "x" again', "max_tokens": 60})
# shares of the requests; each is a method of ``Soak``
KINDS = {"probe": 8, "stream": 8, "chat": 8, "leave": 18, "refused": 8}
KINDS |= {"wrong_key": 2, "endless": 1, "slow": 1, "half_head": 1}


class Soak:
    """Clients of one server."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.counts: Counter[str] = Counter()
        self.texts: dict[str, set[str]] = {name: set() for name in PROBES}
        self._lock = threading.Lock()

    def note(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def state(self) -> dict[str, int]:
        """Memory in MiB, open files and threads of the server."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        files = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        return {"mib": int(fields["VmRSS"].split()[0]) // 1024, "files": files, "threads": int(fields["Threads"])}

    def client(self, seed: int, until: float) -> None:
        """Send requests of random kinds until a time."""
        draws = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=PATIENCE, headers=HEADERS) as client:
            while time.monotonic() < until:
                (kind,) = draws.choices(list(KINDS), list(KINDS.values()))
                try:
                    getattr(self, kind)(client, draws)
                except (httpx.TransportError, OSError) as error:
                    self.note(f"failed: {kind} by {type(error).__name__}")

    def expect(self, kind: str, status: int, response: httpx.Response) -> None:
        """Note a response, as failed if it has another status."""
        self.note(f"{kind} {status}" if response.status_code == status else f"failed: {kind} {response.status_code}")

    def probe(self, client: httpx.Client, draws: random.Random) -> None:
        name = draws.choice(list(PROBES))
        response = client.post(COMPLETIONS, json=PROBES[name])
        self.expect(f"{name} probe", 200, response)
        if response.status_code == 200:
            with self._lock:
                self.texts[name].add(response.json()["choices"][0]["text"])

    def stream(self, client: httpx.Client, draws: random.Random) -> None:
        body = {"prompt": "the " * draws.randint(1, 20), "max_tokens": draws.randint(1, 40), "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as response:
            lines = list(response.iter_lines())
        self.expect("stream", 200, response)
        if response.status_code == 200 and "data: [DONE]" not in lines:
            self.note("failed: cut stream")

    def leave(self, client: httpx.Client, draws: random.Random) -> None:
        body = {"prompt": "the", "max_tokens": 60, "stream": draws.random() < 0.5, "ignore_eos": True}
        with suppress(httpx.TimeoutException):
            httpx.post(self.url + COMPLETIONS, json=body, headers=HEADERS, timeout=draws.uniform(0.01, 0.3))
        self.note("left")

    def refused(self, client: httpx.Client, draws: random.Random) -> None:
        kind = draws.choice(list(REFUSED))
        content, status = REFUSED[kind]
        self.expect(kind, status, client.post(COMPLETIONS, content=content, headers=JSON))

    def wrong_key(self, client: httpx.Client, draws: random.Random) -> None:
        self.expect("a wrong key", 401, client.post(COMPLETIONS, json=PROBES["greedy"], headers={"x-api-key": "wrong"}))

    def endless(self, client: httpx.Client, draws: random.Random) -> None:
        self.expect("an endless grammar", 400, client.post(COMPLETIONS, content=ENDLESS, headers=JSON))

    def slow(self, client: httpx.Client, draws: random.Random) -> None:
        def parts() -> Iterator[bytes]:
            yield b"{"
            time.sleep(2 * BODY_SECONDS)
            yield b"}"

        self.expect("a slow body", 408, client.post(COMPLETIONS, content=parts(), headers=JSON))

    def half_head(self, client: httpx.Client, draws: random.Random) -> None:
        host, _, port = self.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: ")
            closed = connection.recv(1) == b""
        self.note("half a head" if closed else "failed: half a head")

    def chat(self, client: httpx.Client, draws: random.Random) -> None:
        talk = [{"role": "user", "content": "the " * draws.randint(1, 9)}]
        body = {"messages": talk, "max_tokens": draws.randint(1, 20)}
        self.expect("chat", 200, client.post("/v1/chat/completions", json=body))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "anabranch", "serve", "--port", "0", "--model", arguments.model]
    command += ["--prefix-memory", str(PREFIXES), "--prefix-disk", str(PREFIXES), "--api-key", KEY]
    command += ["--max-body", str(MAX_BODY), "--body-seconds", str(BODY_SECONDS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, "--prefix-folder", folder, *arguments.more],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("serving at ").strip()
            if not url:
                sys.exit("the server did not start; run anabranch serve to see why")
            return load(Soak(url, process.pid), arguments)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def load(soak: Soak, arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the server; returns the record."""
    warm = drive(soak, arguments.clients, arguments.seconds / 10, seed=0)
    after = drive(soak, arguments.clients, arguments.seconds, seed=1000, files=warm["files"])
    rows = len(slots(soak.url))
    problems = [f"{count} times {what}" for what, count in soak.counts.items() if what.startswith("failed")]
    problems += [f"{rows} rows are left"] if rows else []
    problems += [f"{len(texts)} texts of the {name} probe" for name, texts in soak.texts.items() if len(texts) != 1]
    problems += [f"files grew from {warm['files']} to {after['files']}"] if after["files"] > warm["files"] else []
    if after["mib"] > GROWTH * warm["mib"]:
        problems.append(f"memory grew from {warm['mib']} to {after['mib']} MiB")
    return {
        "command": shown_command("python", *sys.argv),
        "environment": environment(torch.device("cpu")),
        "seconds": arguments.seconds,
        "clients": arguments.clients,
        "model": Path(arguments.model).name,
        "warm": warm,
        "after": after,
        "requests": dict(sorted(soak.counts.items())),
        "problems": problems,
    }


def slots(url: str) -> Any:
    """The sequences that decode or wait."""
    return httpx.get(f"{url}/slots", headers=HEADERS, timeout=PATIENCE).json()


def drive(soak: Soak, clients: int, seconds: float, *, seed: int, files: int = 0) -> dict[str, int]:
    """Let clients run, then wait until the server is idle and has ``files`` open files or fewer; returns its state."""
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(clients) as pool:
        for each in [pool.submit(soak.client, seed + number, until) for number in range(clients)]:
            each.result()
    limit = time.monotonic() + PATIENCE
    while slots(soak.url) and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(1)  # for connections that clients closed
    while files and soak.state()["files"] > files and time.monotonic() < limit:
        time.sleep(0.1)
    return soak.state()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="default", help="what anabranch serve loads")
    parser.add_argument("--seconds", type=float, default=300.0, help="load the server for so long after the warm-up")
    parser.add_argument("--clients", type=int, default=16, help="clients at the same time")
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("more", nargs="*", help="after --: more options of anabranch serve")
    arguments = parser.parse_args()
    record = run(arguments)
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.out is not None:
        write_atomically(arguments.out, text + "\n")
    sys.exit(1 if record["problems"] else 0)


if __name__ == "__main__":
    main()
