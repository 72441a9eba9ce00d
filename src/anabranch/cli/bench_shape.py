"""``anabranch bench shape``: time the steps of a model of a given size with random weights."""

from __future__ import annotations

import json

from anabranch.cli.bench_config import ShapeConfig, command
from anabranch.cli.layout import status_console

__all__ = ["run"]


def run(config: ShapeConfig) -> None:
    """Measure, print the result, and write it to ``--out``."""
    import torch

    from anabranch.bench.journal import beside
    from anabranch.bench.report import environment
    from anabranch.bench.shapes import ROUNDS, WIDTHS, measure_shape, shape_record, shape_table
    from anabranch.cli.layout import print_tables
    from anabranch.model.load import resolve_device, resolve_dtype
    from anabranch.support.files import check_output, write_atomically
    from anabranch.support.processor import set_threads

    if config.out is not None:
        check_output(beside(config.out, ".json"), force=config.force)
    set_threads(config.threads)
    console, place = status_console(), resolve_device(config.device)
    shape = measure_shape(
        config.shape,
        dtype=resolve_dtype(config.dtype) or torch.bfloat16,
        device=place,
        rounds=ROUNDS * config.repeats,
        report=lambda what, done, total: console.print(f"{done}/{total} {what}") if what else None,
        widths=config.width or WIDTHS,
        batches=config.batch or (1,),
        contexts=config.context_tokens or (512,),
    )
    result = {"command": command(), "environment": environment(place), **shape_record(shape)}
    if config.out is not None:
        write_atomically(beside(config.out, ".json"), json.dumps(result, indent=1) + "\n")
    if config.as_json:
        print(json.dumps(result))
    else:
        print_tables(shape_table(shape))
    if config.out is not None:
        console.print(f"wrote {beside(config.out, '.json')}")
