"""``anabranch bench peers``: the environments that other engines run in."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from anabranch.cli.help import HELP

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Install, list and remove other engines, which 'anabranch bench --peer' compares with ours.",
    **HELP,
)


@app.command()
def install(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="engines by the names that 'list' shows")],
) -> None:
    """Install engines with pip, each in its own virtual environment.

    anabranch's own packages are not changed. Some engines are large: vLLM and OpenVINO take 1 to 2 GB with torch.
    Engines that are installed already are skipped.
    """
    from rich.console import Console

    from anabranch.bench.peers.environments import environment_of, status
    from anabranch.bench.peers.environments import install as build

    console = Console(stderr=True, highlight=False)
    wanted = {name: environment_of(name) for name in names}  # check all names before anything is installed
    for name, environment in wanted.items():
        if environment is None:
            print(f"{name} needs nothing: it runs on anabranch's own interpreter")
            continue
        fresh = build(environment, lambda line: console.print(line, markup=False, overflow="ellipsis", no_wrap=True))
        size = f"{status(environment).bytes / 1e6:.0f} MB"
        print(f"{name} is installed ({size})" if fresh else f"{name} was installed already ({size})")


@app.command("list")
def show(as_json: Annotated[bool, typer.Option("--json", help="print the list as JSON")] = False) -> None:
    """List the engines: what each is, whether it is installed, and its size on disk."""
    from anabranch.bench.peers.catalogue import ENVIRONMENTS, PEERS
    from anabranch.bench.peers.environments import status
    from anabranch.cli.layout import print_tables
    from anabranch.support.table import Table

    standing = {name: status(name) for name in ENVIRONMENTS}
    records: list[dict[str, Any]] = []
    for spec in PEERS.values():
        known = None if spec.environment is None else standing[spec.environment]
        records.append(
            {
                "name": spec.name,
                "summary": spec.summary,
                "options": list(spec.options),
                "environment": spec.environment,
                "installed": known is None or known.ready,
                "bytes": 0 if known is None else known.bytes,
                "requirements": list(spec.requirements),
            }
        )
    if as_json:
        print(json.dumps(records))
        return
    rows = []
    for record in records:
        if record["environment"] is None:
            state = "comes with anabranch"
        elif record["installed"]:
            state = f"yes, {record['bytes'] / 1e6:.0f} MB" + (
                "" if record["environment"] == record["name"] else f" with {record['environment']}"
            )
        else:
            state = "no"
        rows.append((record["name"], record["summary"], state))
    print_tables([Table(("peer", "description", "installed"), rows, left=3)])


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="an engine by the name that 'list' shows")],
) -> None:
    """Delete an engine's environment, which other engines may share."""
    from anabranch.bench.peers.environments import environment_of
    from anabranch.bench.peers.environments import remove as delete
    from anabranch.errors import InputError

    environment = environment_of(name)
    if environment is None:
        raise InputError(f"{name} runs on anabranch's own interpreter, so there is nothing to remove")
    print(f"{environment} is removed" if delete(environment) else f"{environment} was not installed")
