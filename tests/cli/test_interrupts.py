"""Ctrl-C while the program is still being imported ends it as later."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "anabranch.cli.train":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from anabranch.__main__ import main
main()
"""


def test_ctrl_c_during_imports_ends_in_one_line() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nstopped\n")
