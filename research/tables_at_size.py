"""Measures building and reading the tables of methods at a size that matters, from a synthetic text.

The text has a Zipf vocabulary and consists of spans of 1 to 40 tokens, copied from a base text of 50 million tokens, so
that n-grams of all lengths repeat. Prints one JSON object: for each kind of tables the time to build it, peak memory,
bytes on disk, the time to open it and the time to draft from it.

Memory is given twice: anonymous memory, which the build needs, and all resident memory, which includes mapped pages of
the files that are written and read. The system can take mapped pages back at any time. The base text is in neither.

    python research/tables_at_size.py datastore ngram --tokens 100000000 --folder tables --out benchmarks/NAME.json
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
from anabranch.drafting.tables import Tokenizer, build_tables
from anabranch.methods import Method, Row, methods
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
    """The text that spans are copied from; in memory from before the first build to the end."""
    random = np.random.default_rng(0)
    return np.concatenate([(random.zipf(1.1, size=BASE // 50) % VOCABULARY).astype(np.uint16) for _ in range(50)])


def synthetic(tokens: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Documents with ``tokens`` tokens in total."""
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
    """The peak growth of this process's memory while it was watched, in bytes: anonymous, and all resident."""

    def __init__(self) -> None:
        self._before = self._most = self._now()
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def _now() -> tuple[int, int]:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
        anonymous, resident = (1024 * int(lines[name].split()[0]) for name in ("RssAnon", "VmRSS"))
        return anonymous, resident

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            now = self._now()
            self._most = max(self._most[0], now[0]), max(self._most[1], now[1])

    def stop(self) -> tuple[int, int]:
        self._done.set()
        return self._most[0] - self._before[0], self._most[1] - self._before[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commands", nargs="+", choices=sorted(with_tables()), help="what to build")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--memory", type=int, default=512, help="MB that a build may use")
    parser.add_argument("--folder", type=Path, required=True, help="build each kind of tables in a subfolder; kept")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    base_text()
    result: dict[str, Any] = {
        "what": "building and reading tables of a synthetic text",
        "tokens": args.tokens,
        "memory_option_mb": args.memory,
        "tables": {name: measured(name, args.tokens, args.memory, args.folder / name) for name in args.commands},
        "environment": environment(torch.device("cpu")),
        "command": shown_command(
            *("python", "research/tables_at_size.py", *args.commands),
            *("--tokens", str(args.tokens), "--memory", str(args.memory), "--folder", args.folder.name),
        ),
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=2) + "\n")


def with_tables() -> dict[str, Method]:
    """The methods that draft from tables, by the command that builds them."""
    return {method.tables.command: method for method in methods() if method.tables is not None}


def measured(command: str, tokens: int, memory: int, folder: Path) -> dict[str, Any]:
    """Build one kind of tables and draft from it."""
    method = with_tables()[command]
    assert method.tables is not None
    began, peak = time.perf_counter(), Peak()
    record = build_tables(
        method.tables,
        synthetic(tokens, seed=1),
        folder,
        tokenizer=Tokenizer("synthetic", "0" * 64, VOCABULARY),
        memory=memory,
        report=lambda line: print(f"{command} {time.perf_counter() - began:7.1f} s  {line}", flush=True),
    )
    seconds = time.perf_counter() - began
    anonymous, resident = peak.stop()
    return {
        **{name: value for name, value in record["facts"].items() if isinstance(value, int)},
        "build_seconds": round(seconds, 1),
        "peak_anonymous_mb": round(anonymous / 1e6),
        "peak_resident_mb": round(resident / 1e6),
        "bytes_on_disk": sum(path.stat().st_size for path in folder.iterdir()),
        **lookups(method, folder),
    }


def lookups(method: Method, folder: Path) -> dict[str, Any]:
    """Milliseconds to open the tables and to draft, and nodes of a draft, for a text made like the stored one."""
    config = ModelConfig("llama", VOCABULARY, 8, 1, 1, 1, 8, 8, 4096)
    target = build_decoder(config, device="cpu")
    settings = method.settings.parse(f"data={folder}", method.name)
    began = time.perf_counter()
    drafter = method.build(target, settings, None)
    opened = time.perf_counter() - began
    text = next(synthetic(2 * DRAFTS, seed=2)).tolist()
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
        "draft_ms_99th_percentile": round(1e3 * float(np.quantile(took, 0.99)), 3),
        "nodes_mean": round(float(np.mean(nodes)), 1),
    }


if __name__ == "__main__":
    main()
