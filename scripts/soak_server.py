"""Loads a server for a while as its worst clients would, and checks that everything returns to where it was.

    python scripts/soak_server.py --seconds 3600 --out soak.json
    python scripts/soak_server.py --seconds 300 --model FOLDER

Starts ``anabranch serve`` on a free port of this machine and sends it streams, whole answers, clients that leave,
damaged bodies and wrong models. Memory and open files are read from /proc after a warm-up of a tenth of the time, and
again at the end, when no row may be left. Answers to one prompt are compared all along.

Exits with 1 where something leaked, hung or differed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from anabranch.support.files import write_atomically

PATIENCE = 120.0  # seconds after which an answer counts as hung
PREFIXES = 8  # MiB of kept texts; so few are full after the warm-up, and do not count as growth
GROWTH = 1.15  # of memory after the warm-up, which is no leak: allocators keep pages
PROBE = {"prompt": "the river", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Soak:
    """Clients of one server."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.counts: Counter[str] = Counter()
        self.texts: set[str] = set()
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
        kinds = (self.probe, self.stream, self.leave, self.damaged, self.chat)
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as client:
            while time.monotonic() < until:
                try:
                    draws.choice(kinds)(client, draws)
                except (httpx.TimeoutException, httpx.TransportError) as error:
                    self.note(f"failed: {type(error).__name__}")

    def probe(self, client: httpx.Client, draws: random.Random) -> None:
        response = client.post("/v1/completions", json=PROBE)
        self.note(f"probe {response.status_code}")
        if response.status_code == 200:
            with self._lock:
                self.texts.add(response.json()["choices"][0]["text"])

    def stream(self, client: httpx.Client, draws: random.Random) -> None:
        body = {"prompt": "the " * draws.randint(1, 20), "max_tokens": draws.randint(1, 40), "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = list(response.iter_lines())
        ended = bool(lines) and "data: [DONE]" in lines
        self.note(f"stream {response.status_code}" if ended or response.status_code != 200 else "failed: cut stream")

    def leave(self, client: httpx.Client, draws: random.Random) -> None:
        body = {"prompt": "the", "max_tokens": 60, "stream": draws.random() < 0.5, "ignore_eos": True}
        with suppress(httpx.TimeoutException):
            httpx.post(self.url + "/v1/completions", json=body, timeout=draws.uniform(0.01, 0.3))
        self.note("left")

    def damaged(self, client: httpx.Client, draws: random.Random) -> None:
        content = draws.choice((b"{", b"\xff", b'{"prompt": 3}', b'{"prompt": "x", "model": "none"}'))
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        self.note(f"damaged {response.status_code}")

    def chat(self, client: httpx.Client, draws: random.Random) -> None:
        talk = [{"role": "user", "content": "the " * draws.randint(1, 9)}]
        response = client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": draws.randint(1, 20)})
        self.note(f"chat {response.status_code}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "anabranch", "serve", "--port", "0", "--model", arguments.model]
    command += ["--prefix-memory", str(PREFIXES), *arguments.more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
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
    with httpx.Client(base_url=soak.url, timeout=PATIENCE) as client:
        rows = len(client.get("/slots").json())
    problems = [f"{count} times {what}" for what, count in soak.counts.items() if what.startswith("failed")]
    problems += [f"{count} times {what}" for what, count in soak.counts.items() if what.endswith(" 500")]
    problems += [f"{rows} rows are left"] if rows else []
    problems += [f"{len(soak.texts)} texts of one greedy prompt"] if len(soak.texts) != 1 else []
    problems += [f"files grew from {warm['files']} to {after['files']}"] if after["files"] > warm["files"] else []
    if after["mib"] > GROWTH * warm["mib"]:
        problems.append(f"memory grew from {warm['mib']} to {after['mib']} MiB")
    record = {"seconds": arguments.seconds, "clients": arguments.clients, "model": Path(arguments.model).name}
    return {**record, "warm": warm, "after": after, "requests": dict(sorted(soak.counts.items())), "problems": problems}


def drive(soak: Soak, clients: int, seconds: float, *, seed: int, files: int = 0) -> dict[str, int]:
    """Let clients run, then wait until the server is idle and has ``files`` open files or fewer; returns its state."""
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(clients) as pool:
        for each in [pool.submit(soak.client, seed + number, until) for number in range(clients)]:
            each.result()
    limit = time.monotonic() + PATIENCE
    while httpx.get(f"{soak.url}/slots", timeout=PATIENCE).json() and time.monotonic() < limit:
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
