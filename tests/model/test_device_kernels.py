"""The Triton kernels against their definitions, in Triton's interpreter; skipped where Triton is not installed.

PyTorch's CPU wheels come without it: ``pip install triton`` in an environment for tests. The interpreter has to be
chosen before Triton is imported, so the cases run in a process of their own. It multiplies no bfloat16, so float16 is
taken instead.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

HERE = """
import torch
from anabranch.model.device.cases import cases, difference
from anabranch.model.device.kernels import KERNELS

kernels, found = 0, []
for dtype in (torch.float32, torch.float16):
    for case in cases(dtype, long=130):
        kernels += 1
        if wrong := difference(case, KERNELS, torch.device("cpu")):
            found.append(wrong)
print(kernels, found)
"""


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compute_what_their_definitions_say() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HERE],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, _, wrong = done.stdout.strip().partition(" ")
    assert int(count) > 100
    assert wrong == "[]"
