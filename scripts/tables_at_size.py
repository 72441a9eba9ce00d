"""Builds the tables of a method from a made-up text of many tokens, and looks things up in them.

The text has a Zipf vocabulary, and is made of stretches of 1 to 40 tokens of a text of 50 million, so that n-grams
of all lengths occur again. Memory is the process's own: pages of mapped files, which the system may take back, are not
counted.

    python scripts/tables_at_size.py datastore --tokens 100000000 --folder /tmp/store --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.bench.report import environment
from anabranch.methods import Row, methods
from anabranch.methods.tables import Tokenizer, build_tables
from anabranch.model.config import ModelConfig
from anabranch.model.weights import build_decoder
from anabranch.sampling import SamplingParams
from anabranch.support.files import shown_command, write_atomically

VOCABULARY = 49_152
BASE = 50_000_000
DOCUMENT = 500_000
DRAFTS = 2_000


@cache
def base_text() -> NDArray[np.uint16]:
    """What stretches are taken from; it stays in memory from before the build to the end, and is not counted."""
    random = np.random.default_rng(0)
    return np.concatenate([(random.zipf(1.1, size=BASE // 50) % VOCABULARY).astype(np.uint16) for _ in range(50)])


def made_up(tokens: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Documents of together so many tokens."""
    random, base = np.random.default_rng(seed), base_text()
    while tokens > 0:
        lengths = random.integers(1, 41, size=DOCUMENT // 10)
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), min(DOCUMENT, tokens)) + 1)]
        starts = random.integers(BASE - 41, size=len(lengths))
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        document = base[places[: min(DOCUMENT, tokens)]].astype(np.int64)
        tokens -= len(document)
        yield document


class Peak:
    """The most memory of its own that this process held while it was watched, in bytes."""

    def __init__(self) -> None:
        self.bytes = self.before = self._now()
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.bytes = max(self.bytes, self._now())

    def stop(self) -> int:
        self._done.set()
        return self.bytes - self.before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", help="what is built: datastore or ngram")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--memory", type=int, default=512, help="MB")
    parser.add_argument("--folder", type=Path, required=True, help="build here; stays")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    method = next(m for m in methods() if m.tables is not None and m.tables.command == args.command)
    assert method.tables is not None
    tokenizer = Tokenizer("made up", "0" * 64, VOCABULARY)
    base_text()
    began, peak = time.perf_counter(), Peak()

    def report(line: str) -> None:
        print(f"{time.perf_counter() - began:7.1f} s  {line}", flush=True)

    record = build_tables(
        method.tables,
        method.name,
        made_up(args.tokens, seed=1),
        args.folder,
        tokenizer=tokenizer,
        options={"memory": args.memory},
        report=report,
    )
    seconds, own = time.perf_counter() - began, peak.stop()
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    result: dict[str, Any] = {
        "what": f"building {method.tables.title} from a made-up text",
        "tokens": record["facts"]["tokens"],
        "memory_option_mb": args.memory,
        "build_seconds": round(seconds, 1),
        "peak_own_memory_mb": round(own / 1e6),
        "folder_bytes": size,
        **lookups(method, args.folder),
        "environment": environment(torch.device("cpu")),
        "command": shown_command("python", "scripts/tables_at_size.py", *map(str, vars_of(args))),
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=2) + "\n")


def vars_of(args: argparse.Namespace) -> list[object]:
    return [args.command, "--tokens", args.tokens, "--memory", args.memory, "--folder", args.folder.name]


def lookups(method: Any, folder: Path) -> dict[str, Any]:
    """Milliseconds to open the tables and to draft, and nodes of a draft, for a text made like the stored one."""
    config = ModelConfig("llama", VOCABULARY, 8, 1, 1, 1, 8, 8, 4096)
    target = build_decoder(config, device="cpu")
    began = time.perf_counter()
    drafter = method.build(target, method.settings(data=str(folder)), None)
    opened = time.perf_counter() - began
    text = next(made_up(2 * DRAFTS, seed=2)).tolist()
    row = Row(text[:1], 1, SamplingParams(), max_depth=10)
    drafter.join(row)
    nodes, took = [], []
    for token in text[1 : DRAFTS + 1]:
        row.tokens.append(token)
        began = time.perf_counter()
        (tree,) = drafter.draft([row], 16)
        took.append(time.perf_counter() - began)
        nodes.append(tree.size)
    return {
        "open_ms": round(1e3 * opened, 2),
        "draft_ms_median": round(1e3 * float(np.median(took)), 3),
        "nodes_mean": round(float(np.mean(nodes)), 1),
    }


if __name__ == "__main__":
    main()
