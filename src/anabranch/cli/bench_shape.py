"""``anabranch bench shape``: time the passes of models, or of shapes with random weights."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.cli import options
from anabranch.cli.bench_config import ShapeConfig, command
from anabranch.cli.layout import status_console
from anabranch.loading import LoadConfig

if TYPE_CHECKING:
    from anabranch.bench.shapes import Shape

__all__ = ["run"]


def run(config: ShapeConfig) -> None:
    """Measure one model after another, print the results, and write those so far to ``--out`` after each."""
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
        shape = _measured(config, name, weights)
        records.append(shape_record(shape))
        tables += shape_table(shape)
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
