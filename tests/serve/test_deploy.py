"""The files of ``deploy``: their commands exist, their metrics are exported, and the unit and the image are sound."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from anabranch.cli import app
from anabranch.serve.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def unknown_options(words: list[str]) -> list[str]:
    """Options of a command line of ``anabranch serve`` that it does not have."""
    command: Any = typer.main.get_command(app)
    serve = command.commands["serve"]
    known = {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("--") and word not in known]


def test_the_unit() -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (DEPLOY / "anabranch.service").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            entries = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            name, separator, value = line.partition("=")
            assert separator, line
            entries.append((name, value))
    assert list(sections) == ["Unit", "Service", "Install"]
    service = dict(sections["Service"])
    program, verb, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, verb) == ("anabranch", "serve")
    assert unknown_options(words) == []
    drain = int(words[words.index("--drain-seconds") + 1])
    assert drain < int(service["TimeoutStopSec"])
    assert service["SuccessExitStatus"] == "143"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_in_systemds_own_words(tmp_path: Path) -> None:
    unit = tmp_path / "anabranch.service"
    text = (DEPLOY / "anabranch.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/anabranch/bin/anabranch", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_image() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    instructions = [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]
    names = [name for name, _ in instructions]
    assert set(names) <= {
        *("FROM", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD")
    }
    last = instructions[max(place for place, name in enumerate(names) if name == "FROM") :]
    assert last[0][1].endswith("-slim")
    assert not [said for _, said in last if re.search(r"apt-get|gcc|g\+\+|build-essential|ziglang", said)]
    # another version would be replaced by PyPI's build with CUDA
    (torch,) = re.findall(r'"torch[^"]+"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [torch in said for name, said in last if name == "RUN"].count(True) == 1
    assert dict(last)["USER"] != "root"
    command = json.loads(dict(last)["ENTRYPOINT"]) + json.loads(dict(last)["CMD"])
    assert command[:2] == ["anabranch", "serve"]
    assert unknown_options(command) == []
    assert "/health" in dict(last)["HEALTHCHECK"]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    exported = {
        name
        for family in Metrics("toy").registry.collect()
        for name in (family.name, f"{family.name}_total", f"{family.name}_bucket")
    }
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    shown = [name for panel in board["panels"] for target in panel["targets"] for name in names_in(target["expr"])]
    assert len(shown) >= len(board["panels"])
    assert set(shown) <= exported
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def names_in(expression: str) -> list[str]:
    return re.findall(r"(?:vllm|anabranch):\w+", expression)
