"""``anabranch bench``: compare drafters and other engines; compare results; install peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli import bench_prompts, bench_rows, bench_shape, peers
from anabranch.cli.bench_config import BenchConfig
from anabranch.cli.configured import configured
from anabranch.cli.help import HELP, Verb

__all__ = ["app"]

app = typer.Typer(invoke_without_command=True, **HELP)
app.add_typer(peers.app, name="peers")


@app.callback()
@configured
def bench(context: typer.Context, config: BenchConfig) -> None:
    """Measure drafters and other engines on the same prompts, on this machine.

    All contenders decode each prompt, in rotating order, before the next one. Speedups are relative to plain decoding
    (none) of the same prompts with the same weights, which is always measured too. Run nothing else at the same time.

    --rows N measures throughput and latency with N concurrent prompts instead, and --shape times the steps of a model
    of that size with random weights.

    Ctrl-C keeps the results so far; --resume continues. 'bench compare' compares two results, and 'bench peers'
    installs other engines. 'bench table' puts the results of one task, for several models, into one table.
    """
    if context.invoked_subcommand is not None:
        return
    given = _given(context)
    if config.shape is not None:
        bench_shape.run(config, given)
    elif config.rows:
        bench_rows.run(config, given)
    else:
        bench_prompts.run(config, given)


def _given(context: typer.Context) -> dict[str, str]:
    """The options given on the command line: the spelling of each, by field."""
    found = {}
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if source is not None and source.name == "COMMANDLINE":
            found[str(option.name)] = option.opts[0]
    return found


@app.command("compare", cls=Verb)
def compare_results(
    a: Annotated[Path, typer.Argument(metavar="A", help="a result: the FILE of 'anabranch bench --out FILE'")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another result")],
    as_json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Compare two results: the speed ratio B / A by contender, with quartiles over prompts.

    Warns if model, dtype, machine, threads or prompts differ, since the ratio then depends on these too.
    """
    from anabranch.bench.compare import compare, comparison_table, read_result
    from anabranch.cli.layout import output, print_tables

    found = compare(read_result(a), read_result(b))
    if as_json:
        print(json.dumps(found))
        return
    console = output()
    for line in (f"A: {a}", f"B: {b}", *(f"warning: {warning}" for warning in found["warnings"])):
        console.print(line)
    print_tables([comparison_table(found)], console)


@app.command("table", cls=Verb)
def task_table(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILE ...", help="results of one task: the FILE of 'bench --task --out FILE'"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
) -> None:
    """Put results of one task into one table, such as those of several tuned models.

    Speedups, and differences of quality row by row, are relative to plain decoding in the first result. Warns if
    machine, dtype or prompts differ.
    """
    from anabranch.bench.compare import read_result
    from anabranch.bench.task_table import collect, rows_of_table
    from anabranch.cli.layout import output, print_tables

    found = collect([(path.name.removesuffix(".json"), read_result(path)) for path in results])
    if as_json:
        print(json.dumps(found))
        return
    console = output()
    for warning in found["warnings"]:
        console.print(f"warning: {warning}")
    print_tables([rows_of_table(found)], console)
