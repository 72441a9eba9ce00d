"""``anabranch bench --rows N``: throughput and latency with N concurrent prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from anabranch.cli import options
from anabranch.cli.bench_config import (
    BenchConfig,
    Weights,
    command,
    described,
    encode,
    entries_of,
    load,
    refuse_all_but,
)
from anabranch.cli.layout import status_console
from anabranch.cli.options import check_at_least
from anabranch.errors import CapabilityError
from anabranch.support.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch.bench.entries import Entry
    from anabranch.bench.run import Encoded
    from anabranch.bench.throughput import Batched, Round

__all__ = ["run"]

OTHERS = ("metric", "examples", "html", "figures", "resume", "trace", "width", "batch", "context_tokens")
SCHEMA = 1


def run(config: BenchConfig, given: Mapping[str, str]) -> None:
    """Check the options before loading, measure, print the result, and write it to ``--out``."""
    from anabranch.bench.journal import beside
    from anabranch.bench.machine import measure_machine
    from anabranch.bench.report import environment
    from anabranch.bench.throughput import check_rows
    from anabranch.model.quantize import QUANTIZATIONS
    from anabranch.support.files import check_output, check_writable, write_atomically

    allowed = [name for name in given if name not in OTHERS]
    refuse_all_but(allowed, given, "--rows measures throughput")
    check_at_least(1, max_new_tokens=config.max_new_tokens, repeats=config.repeats)
    out = None if config.out is None else beside(config.out, ".json")
    if out is not None:
        check_writable(out)
        check_output(out, force=config.force)
    entries = _batching(entries_of(config), config)
    prompts = config.prompts.read()
    check_rows(config.rows, len(prompts))
    weights = load(config, [kind for kind in QUANTIZATIONS if any(entry.weights == kind for entry in entries)])
    encoded = encode(config, prompts, weights.first)
    console, target = status_console(), weights.first.target
    console.print("measuring the machine: memory bandwidth and matrix rate")
    machine = measure_machine(target.decoder).to_dict()
    console.print(f"{machine['read_gb_s'][1]:.1f} GB/s; a forward pass takes at least {machine['floor_ms']:.2f} ms")
    done, facts, interrupted = _measure(config, entries, encoded, weights, console)
    result = {
        "schema": SCHEMA,
        "kind": "throughput",
        "complete": not interrupted,
        "run": {"command": command(), **described(config, entries, encoded, weights.first), "rows": list(config.rows)},
        "environment": environment(target.decoder.device),
        "machine": machine,
        "load_seconds": weights.load_seconds,
        "contenders": facts,
        "results": _records(done, entries, greedy=options.params(config.sampling).greedy),
    }
    if out is not None:
        write_atomically(out, json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {out}")
    if config.as_json:
        print(json.dumps(result))
    else:
        _show(result)
    if interrupted:
        console.print(f"stopped after {len(done)} of {config.repeats * len(config.rows)} rounds")
        raise typer.Exit(INTERRUPTED)


def _batching(entries: list[Entry], config: BenchConfig) -> list[Entry]:
    """The contenders, without plain decoding that nothing is compared with.

    Raises CapabilityError for a peer that does not batch.
    """
    from anabranch.bench.entries import plain_of
    from anabranch.bench.peers import parse_peer

    for entry in entries:
        if entry.kind == "peer" and not parse_peer(entry.spec)[0].batches:
            raise CapabilityError(
                f"the peer {entry.name!r} decodes one prompt at a time here, so --rows cannot measure it; leave it "
                "out, or measure the peer transformers"
            )
    plain = plain_of(entries, "none")
    compared = any(entry.weights == "none" and entry.name != plain for entry in entries)
    if config.loading.quantize == "none" or compared:
        return entries
    return [entry for entry in entries if entry.name != plain]


def _measure(
    config: BenchConfig, entries: Sequence[Entry], encoded: Sequence[Encoded], weights: Weights, console: Console
) -> tuple[list[Round], list[dict[str, Any]], bool]:
    """Open the contenders and measure; returns the rounds, facts by contender, and whether it was interrupted."""
    from anabranch.bench.run import FAILURES, describe
    from anabranch.bench.throughput import rounds

    contenders: dict[str, Batched] = {}
    facts: list[dict[str, Any]] = []
    done: list[Round] = []
    with ExitStack() as exits:
        for entry in entries:
            fact: dict[str, Any] = {"name": entry.name, "kind": entry.kind, "weights": entry.weights}
            facts.append(fact)
            try:
                contenders[entry.name] = _open(entry, config, weights, encoded, fact, exits)
            except FAILURES as error:
                fact["error"] = describe(error)
                console.print(f"{entry.name} is not measured: {fact['error']}")
        measured = rounds(
            contenders,
            [ids for _, ids in encoded],
            config.rows,
            max_new_tokens=config.max_new_tokens,
            repeats=config.repeats,
            report=lambda now, total, what: console.print(f"round {now + 1}/{total}: {what}") if what else None,
        )
        try:
            for one in measured:
                done.append(one)
                for name, why in one.errors.items():
                    console.print(f"{name} is not measured: {why}")
        except KeyboardInterrupt:
            if not done:
                raise
            return done, facts, True
    if not any(one.runs for one in done):
        why = "; ".join(f"{name}: {error}" for one in done for name, error in one.errors.items())
        raise CapabilityError(f"no contender could be measured ({why or 'none could be opened'})")
    return done, facts, False


def _open(
    entry: Entry,
    config: BenchConfig,
    weights: Weights,
    encoded: Sequence[Encoded],
    fact: dict[str, Any],
    exits: ExitStack,
) -> Batched:
    """Open a contender, and store its properties in ``fact``."""
    import torch

    from anabranch.bench.peers import open_peer
    from anabranch.bench.throughput import BatchedPeer, Ours
    from anabranch.control.profiles import settle
    from anabranch.methods import make_drafter, resolve_spec

    loaded, sampling = weights.loaded[entry.weights], options.params(config.sampling)
    if entry.kind == "ours":
        spec = resolve_spec(entry.spec, *loaded.modules, target=loaded.target.decoder)
        fact["drafter"] = str(spec)
        drafter = make_drafter(spec, loaded.target.decoder, *loaded.modules)
        known = settle(loaded.target, loaded.adapters) if drafter.adaptive else None
        costs, choice = (None, None) if known is None else (known.costs, known.choice)
        return Ours(loaded.target, drafter, sampling, costs, choice)
    capacity = max(len(ids) for _, ids in encoded) + config.max_new_tokens
    peer = open_peer(entry.spec, loaded.target, sampling=sampling, threads=torch.get_num_threads(), capacity=capacity)
    exits.callback(peer.close)
    fact["info"] = peer.info
    return BatchedPeer(peer)


def _records(done: Sequence[Round], entries: Sequence[Entry], *, greedy: bool) -> list[dict[str, Any]]:
    from anabranch.bench.entries import plain_of
    from anabranch.bench.throughput import summarise

    opened = {name for one in done for name in (*one.runs, *one.errors)}
    ours = {entry.name for entry in entries if entry.kind == "ours"}
    baselines = {entry.name: plain_of(entries, entry.weights) for entry in entries if entry.name in opened}
    # a peer samples with its own random numbers
    return summarise(done, baselines, comparable=lambda name: greedy or name in ours)


def _show(result: Mapping[str, Any]) -> None:
    from anabranch.bench.report import plain_table
    from anabranch.bench.throughput import THROUGHPUT_TITLES, throughput_rows
    from anabranch.cli.layout import output, print_tables

    run, where = result["run"], result["environment"]
    console = output()
    console.print(
        f"{run['suite']}: {run['prompts']} prompts, {run['max_new_tokens']} new tokens, {run['dtype']}, "
        f"{run['repeats']} repeat{'s' if run['repeats'] > 1 else ''}; model {run['model']}"
    )
    console.print(f"{where['date']}, {where['device']}, {where['processor']}, {where['threads']} threads")
    table = plain_table()
    for place, title in enumerate(THROUGHPUT_TITLES):
        table.add_column(title, justify="left" if place == 0 else "right")
    for row in throughput_rows(result["results"]):
        table.add_row(*row)
    print_tables([table], console)
