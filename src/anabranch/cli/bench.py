"""``anabranch bench``: compare drafters and other engines; compare results; install peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli import bench_load, bench_run, bench_shape, peers
from anabranch.cli.configured import configured
from anabranch.cli.help import HELP, Verb, Verbs

__all__ = ["Bench", "app"]


class Bench(Verbs):
    """The group: options without a verb are those of ``default``."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default verb before options, but not before --help."""
        if not args or (args[0].startswith("-") and args[0] not in HELP["context_settings"]["help_option_names"]):
            args = [self.default, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    help="""Measure drafters and other engines on this machine, and compare results.

    Options without a verb are those of 'run': 'anabranch bench --method auto' is 'anabranch bench run --method auto'.
    Run nothing else at the same time.
    """,
    **HELP,
)
app.add_typer(peers.app, name="peers")


for name, verb in (
    ("run", bench_run.run),
    ("load", bench_load.load),
    ("task", bench_run.task),
    ("shape", bench_shape.shape),
):
    app.command(name, cls=Verb)(configured(verb))


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

    compared = compare(read_result(a), read_result(b))
    if as_json:
        print(json.dumps(compared))
        return
    console = output()
    for line in (f"A: {a}", f"B: {b}", *(f"warning: {warning}" for warning in compared["warnings"])):
        console.print(line)
    print_tables([comparison_table(compared)], console)


@app.command("table", cls=Verb)
def task_table(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILE ...", help="results of one task: the FILE of 'bench task --out FILE'"),
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

    collected = collect([(path.name.removesuffix(".json"), read_result(path)) for path in results])
    if as_json:
        print(json.dumps(collected))
        return
    console = output()
    for warning in collected["warnings"]:
        console.print(f"warning: {warning}")
    print_tables([rows_of_table(collected)], console)
