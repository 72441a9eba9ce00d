"""The logger ``anabranch``, and the notices that the command line shows."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import Terminal

from anabranch.errors import PerformanceWarning
from anabranch.loading import LoadConfig, load
from anabranch.support.log import notice, warn
from toy_text import ToyFolders

INFO = "from anabranch.cli import main; main(['info'])"


@pytest.mark.thorough
def test_the_package_is_silent_unless_logging_is_configured(toys: ToyFolders) -> None:
    code = f"import anabranch; print(anabranch.load({str(toys.model)!r}, drafter='none').generate('a').text != '')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_loading_is_logged(toys: ToyFolders, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "anabranch"):
        load(LoadConfig(str(toys.model), (toys.adapter,), "float32", "cpu"))
    assert any(
        "float32 on cpu, quantize=none, kv=auto, adapters of streams" in each.getMessage() for each in caplog.records
    )
    assert {each.name for each in caplog.records} == {"anabranch"}


def test_warnings_are_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(PerformanceWarning, match="it is slow") as caught:
        warn("it is slow", PerformanceWarning)
    assert caught[0].filename == __file__
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [("WARNING", "it is slow")]


def test_a_notice_is_a_record_of_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "anabranch"):
        notice("compiling")
    assert caplog.records[0].levelno == logging.INFO


@pytest.mark.thorough  # two processes that import PyTorch
@pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux")
def test_compiling_is_announced_once(tmp_path: Path) -> None:
    # a compiler that fails, so that nothing takes time
    env = {**os.environ, "ANABRANCH_HOME": str(tmp_path), "CXX": "false", "ANABRANCH_KERNELS": ""}
    packed = f"from anabranch.native import recipe; recipe.PACKED = pathlib.Path({str(tmp_path)!r})"
    code = f"import pathlib; {packed}; {INFO}"  # as without a wheel
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    if "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("no kernels for this processor")
    assert "compiling kernels, once, about 20 s\n" in done.stderr
    with Terminal([], env=env, code=code) as terminal:
        assert "compiling kernels, once, about 20 s\n" in terminal.ended()


def test_a_notice_stands_above_the_line_of_a_wait() -> None:
    code = (
        "from anabranch.cli.show import Notices, Wait\n"
        "from anabranch.support.log import notice\n"
        "with Notices(), Wait('loading it ...'):\n"
        "    notice('compiling kernels')\n"
    )
    with Terminal([], code=code) as terminal:
        shown = terminal.ended()
    assert shown == "loading it ...compiling kernels\nloading it ..."  # the line is erased before and shown again after
    assert terminal.seen.index("\x1b[K") < terminal.seen.index("compiling")
