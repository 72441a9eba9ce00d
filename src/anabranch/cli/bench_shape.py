"""``anabranch bench shape``: time the passes of models, or of shapes with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from anabranch.cli import completion, options
from anabranch.cli.bench_contenders import Out, Repeats, command
from anabranch.cli.layout import status_console
from anabranch.declared import hints_of
from anabranch.loading import LoadConfig

if TYPE_CHECKING:
    from anabranch.bench.shapes import Shape

__all__ = ["ShapeConfig", "shape"]


LOADING = {name: get_args(hint)[1] for name, hint in hints_of(LoadConfig).items() if get_origin(hint) is Annotated}


@dataclass(frozen=True, kw_only=True)
class ShapeConfig:
    """The options of ``bench shape``."""

    models: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="MODEL[@KIND] ...",
            help="a size with random weights (135m, 7b, 13b or 33b), or a model to load (default, a folder, a .gguf "
            "file or a hub id); @int8 or @int4 quantises its weights, 7b@Q4_K stores random ones as GGUF files do",
            autocompletion=completion.one_of("135m", "7b", "13b", "33b", "default"),
        ),
    ]
    width: Annotated[tuple[int, ...], typer.Option(metavar="N", help="verify N nodes in a step; repeatable")] = ()
    batch: Annotated[tuple[int, ...], typer.Option(metavar="N", help="decode N rows at a time; repeatable")] = ()
    context_tokens: Annotated[
        tuple[int, ...], typer.Option("--context", metavar="N", help="hold N tokens in the KV cache; repeatable")
    ] = ()
    dtype: Annotated[str, LOADING["dtype"]] = "auto"
    device: Annotated[str, LOADING["device"]] = "auto"
    threads: Annotated[int | None, LOADING["threads"]] = None
    repeats: Repeats = 1
    out: Out = None
    force: options.Force = False
    as_json: options.AsJson = False


def shape(config: ShapeConfig) -> None:
    """Time passes by their number of nodes, of models or of random weights in the shape of a model.

    The time of a pass over n nodes, in plain steps, says how many nodes are verified for free on this machine.
    """
    from anabranch.bench.entries import split_weights
    from anabranch.bench.journal import beside
    from anabranch.bench.report import environment
    from anabranch.bench.shape_tables import pass_costs, shape_record, shape_table
    from anabranch.bench.shapes import is_shape
    from anabranch.cli.layout import print_tables
    from anabranch.model.load import resolve_device
    from anabranch.support.files import check_output, write_atomically
    from anabranch.support.processor import set_threads

    if config.out is not None:
        check_output(beside(config.out, ".json"), force=config.force)
    subjects = [split_weights(text) for text in config.models]
    for name, _ in subjects:
        is_shape(name)  # before the first is measured
    set_threads(config.threads)
    console, records, tables = status_console(), [], []
    result: dict[str, Any] = {"command": command(), "environment": environment(resolve_device(config.device))}
    for name, weights in subjects:
        timed = _measured(config, name, weights)
        records.append(shape_record(timed))
        tables += shape_table(timed)
        result["timed"] = records
        if config.out is not None:
            write_atomically(beside(config.out, ".json"), json.dumps(result, indent=1) + "\n")
    if config.as_json:
        print(json.dumps(result))
    else:
        print_tables([*tables, pass_costs(records)])
    if config.out is not None:
        console.print(f"wrote {beside(config.out, '.json')}")


def _measured(config: ShapeConfig, name: str, weights: str) -> Shape:
    """Time the steps of a shape, or of a model that is loaded here and freed by the caller."""
    import torch

    from anabranch.bench.shapes import ROUNDS, WIDTHS, is_shape, measure_decoder, measure_shape
    from anabranch.model.load import resolve_device, resolve_dtype
    from anabranch.support.files import without_folders

    console = status_console()
    grid: dict[str, Any] = {
        "rounds": ROUNDS * config.repeats,
        "widths": config.width or WIDTHS,
        "batches": config.batch or (1,),
        "contexts": config.context_tokens or (512,),
        "report": lambda what, done, total: console.print(f"{name}: {done}/{total} {what}") if what else None,
    }
    if is_shape(name):
        dtype, device = resolve_dtype(config.dtype) or torch.bfloat16, resolve_device(config.device)
        return measure_shape(name, dtype=dtype, device=device, weights=weights, **grid)
    loading = partial(LoadConfig, name, dtype=config.dtype, device=config.device, threads=config.threads)
    target = options.load(loading(quantize="auto" if weights == "none" else weights), adapters=False).target
    return measure_decoder(target.decoder, without_folders(name), weights=target.quantize, **grid)
