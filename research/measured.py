"""The result file of a measurement, written whole or not at all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.report import environment
from anabranch.errors import AnabranchError
from anabranch.support.files import check_output, check_writable, shown_command, write_atomically

__all__ = ["result_options", "write_measured"]


def result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``write_measured`` reads."""
    parser.add_argument("--out", type=Path, required=True, help="write the result to this JSON file")
    parser.add_argument("--force", action="store_true", help="replace an existing result")


def write_measured(
    args: argparse.Namespace, measure: Callable[[argparse.Namespace], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Measure, and write what was measured with the command, the model and the environment; returns what was measured.

    Ends the script with a sentence, and nothing written, where ``--out`` cannot be written or the measurement raises an
    AnabranchError.
    """
    try:
        check_output(args.out, force=args.force)
        check_writable(args.out)
        found = measure(args)
    except AnabranchError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error
    result = {
        "schema": 1,
        "command": shown_command("python", *sys.argv),
        "model": Path(args.model).name,
        **found,
        "environment": environment(torch.device("cpu")),
    }
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    return found
