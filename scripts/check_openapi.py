"""Sends a server what its OpenAPI document allows and forbids, by schemathesis, and fails where it answers otherwise.

    pip install schemathesis    # in an environment of its own
    python scripts/check_openapi.py --schemathesis ENVIRONMENT/bin/st
    python scripts/check_openapi.py --schemathesis ENVIRONMENT/bin/st --model FOLDER --examples 100

One check is left out: that every body which fits the document is accepted. Many values are checked by decoding itself,
against the model's vocabulary, context and chat template.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

SERVING = re.compile(r"serving at (http://\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", required=True, metavar="PROGRAM", help="st of an environment of its own")
    parser.add_argument("--model", default="default", help="what anabranch serve loads")
    parser.add_argument("--examples", type=int, default=25, help="of each operation, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the examples")
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
            tested = [given.schemathesis, "run", f"{found[1]}/openapi.json", "--continue-on-failure", "--no-color"]
            tested += ["--max-examples", str(given.examples), "--seed", str(given.seed), "--request-timeout", "300"]
            sys.exit(subprocess.run([*tested, "--exclude-checks", "positive_data_acceptance"], check=False).returncode)
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
