"""Sends a server what its OpenAPI document allows and forbids, by schemathesis, and fails where it answers otherwise.

    pip install schemathesis    # in an environment of its own
    python scripts/check_openapi.py --schemathesis ENVIRONMENT/bin/st
    python scripts/check_openapi.py --schemathesis ENVIRONMENT/bin/st --model FOLDER --examples 100 --out FILE

One check is left out: that every body which fits the document is accepted. Many values are checked by decoding itself,
against the model's vocabulary, context and chat template. ``--out`` writes the counts and failures of schemathesis.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.report import environment
from anabranch.support.files import shown_command, write_atomically

EXCLUDED = "positive_data_acceptance"
KEPT = ("schemathesis_version", "seed", "operations", "phases", "test_cases", "failures", "errors")  # of its report
SERVING = re.compile(r"serving at (http://\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schemathesis", type=Path, required=True, metavar="PROGRAM", help="st of an environment of its own"
    )
    parser.add_argument("--model", default="default", help="what anabranch serve loads")
    parser.add_argument("--examples", type=int, default=25, help="of each operation, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the examples")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("more", nargs="*", help="after --: more options of anabranch serve")
    given = parser.parse_args()
    command = [sys.executable, "-m", "anabranch", "serve", "--port", "0", "--model", given.model, "--max-tokens", "16"]
    with subprocess.Popen(
        [*command, *given.more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            found = next(filter(None, map(SERVING.search, server.stdout)), None)
            if found is None:
                sys.exit("the server did not start; run anabranch serve to see why")
            report, code = check(found[1], given)
        finally:
            server.terminate()
            server.wait(60)
    if given.out is not None:
        result = {
            "command": shown_command("python", *sys.argv),
            "model": Path(given.model).name,
            "excluded_checks": [EXCLUDED],
            **{name: report[name] for name in KEPT},
            "environment": environment(torch.device("cpu")),
        }
        write_atomically(given.out, json.dumps(result, indent=1) + "\n")
    sys.exit(code)


def check(url: str, given: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run schemathesis on a server; returns its report and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [
            str(given.schemathesis.absolute()),
            "run",
            f"{url}/openapi.json",
            "--continue-on-failure",
            "--no-color",
        ]
        words += ["--max-examples", str(given.examples), "--seed", str(given.seed), "--request-timeout", "300"]
        words += ["--exclude-checks", EXCLUDED, "--report-json-path", str(report)]
        code = subprocess.run(words, check=False, cwd=folder).returncode
        return json.loads(report.read_text(encoding="utf-8")), code


if __name__ == "__main__":
    main()
