"""The lines of presets make clients use a server: those that are here do, files of the others say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import SETTINGS, Server, running

from anabranch.serve.presets import PRESETS, lines, preset_of

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
KEY = "secret"


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_has_the_lines(name: str) -> None:
    page, preset = PAGE.read_text(encoding="utf-8"), preset_of(name)
    plain, keyed = (lines(preset, "http://127.0.0.1:8000", "NAME", key=key) for key in (None, "KEY"))
    assert f"## {preset.title}\n\n`--preset {name}`" in page
    assert f"```{preset.syntax}\n{plain}```" in page
    assert plain.replace("=any", "=KEY").replace(" any", " KEY") == keyed or f"```{preset.syntax}\n{keyed}```" in page


@pytest.fixture(scope="module")
def keyed() -> Any:
    with running(replace(SETTINGS, api_keys=(KEY,), names=("toy",))) as server:
        yield server


def _lines(server: Server, name: str) -> str:
    return lines(preset_of(name), server.url, server.service.names[0], key=KEY if server.service.keys else None)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: Server, keyed: Server) -> None:
    for each in (server, keyed):
        done = subprocess.run(["bash", "-c", _lines(each, "curl")], capture_output=True, text=True, timeout=300)
        assert done.stdout.rstrip().endswith("data: [DONE]"), done


@pytest.mark.thorough
def test_llm(server: Server, keyed: Server, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    llm = [sys.executable, "-m", "llm"]
    for place, each in enumerate((server, keyed)):
        home = tmp_path / str(place)
        home.mkdir()
        env = {**os.environ, "LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": ""}
        (home / "extra-openai-models.yaml").write_text(_lines(each, "llm"))
        if each is keyed:
            subprocess.run([*llm, "keys", "set", "served", "--value", KEY], env=env, check=True, timeout=300)
        asked = [*llm, "-m", "served", "-o", "max_tokens", "8", "the thing"]
        done = subprocess.run(asked, env=env, capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done
        assert done.stdout
        asked[5:5] = ["--schema", "n int"]
        done = subprocess.run(asked, env=env, capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done
        assert done.stdout.startswith(b'{"')


def test_files_of_other_clients() -> None:
    yaml = pytest.importorskip("yaml")
    tomllib = pytest.importorskip("tomllib")
    for key in (None, "KEY"):
        (model,) = yaml.safe_load(lines(preset_of("continue"), "http://here", "m", key=key))["models"]
        assert (model["apiBase"], model["model"], model["apiKey"]) == ("http://here/v1", "m", key or "any")
        codex = tomllib.loads(lines(preset_of("codex"), "http://here", "m", key=key))
        provider = codex["model_providers"][codex["model_provider"]]
        assert (codex["model"], provider["base_url"], provider["wire_api"]) == ("m", "http://here/v1", "responses")
        assert ("env_key" in provider) == (key is not None)
