"""The Triton kernels against their definitions, in Triton's interpreter, and compiled for an H100, which needs no GPU.

Skipped where Triton is not installed.

PyTorch's CPU wheels come without it: ``pip install triton`` in an environment for tests. The interpreter has to be
chosen before Triton is imported, so the cases run in a process of their own. It multiplies no bfloat16, so float16 is
taken instead.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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

COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class Absent:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


driver.set_active(Absent())
run = jit.JITFunction.run
jit.JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)

from anabranch.model.device.cases import cases
from anabranch.model.device.kernels import KERNELS

count = 0
for case in cases(torch.bfloat16, long=1000, every=6):
    KERNELS[case.name](*case.arguments)
    count += 1
print(count, [])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("script", [pytest.param(HERE, id="interpreted"), pytest.param(COMPILED, id="compiled")])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": str(int(script is HERE)), "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    count, _, wrong = done.stdout.strip().partition(" ")
    assert int(count) > (100 if script is HERE else 20)
    assert wrong == "[]"
