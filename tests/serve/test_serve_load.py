"""research/serve_load.py against a real server of a toy model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from served import running

RESEARCH = Path(__file__).resolve().parents[2] / "research"


@pytest.fixture(autouse=True)
def _research(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RESEARCH)


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_load.py", *words])
    importlib.import_module("serve_load").main()


@pytest.mark.thorough
def test_loads_of_two_servers_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, out = tmp_path / "suite.jsonl", tmp_path / "serve.json"
    suite.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(8)))
    with running() as server:
        words = ["--server", f"one={server.url}", "--server", f"two={server.url}", "--suite", str(suite)]
        words += ["--clients", "1", "4", "--shares", "0.9", "--requests", "6", "--new", "8", "--out", str(out)]
        run(words, monkeypatch)
        with pytest.raises(SystemExit, match="exists already"):
            run(words, monkeypatch)
    result = json.loads(out.read_text())
    assert str(tmp_path) not in json.dumps(result["suite"])
    loads = result["loads"]
    assert [record["arm"] for record in loads] == ["one", "two", "two", "one"] * 3
    assert {record.get("clients", record.get("share_of_capacity")) for record in loads} == {1, 4, 0.9}
    for record in loads:
        assert record["requests"] == (8 if "share_of_capacity" in record or record["clients"] == 4 else 6)
        assert "failed" not in record
        assert record["tokens"] > record["requests"] - 2
        assert record["ttft_ms"]["p50"] <= record["ttft_ms"]["p95"] <= record["ttft_ms"]["p99"]


def test_refused_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", str(tmp_path / "o.json")]
    with pytest.raises(SystemExit, match="at least one --arm or --server"):
        run(out, monkeypatch)
    with pytest.raises(SystemExit, match="wants LABEL=VALUE"):
        run(["--arm", "auto", *out], monkeypatch)
    with pytest.raises(SystemExit, match=r"no server answers at http://127\.0\.0\.1:9 .*; start it first"):
        run(["--server", "gone=http://127.0.0.1:9", *out], monkeypatch)


def test_quantiles_and_failures() -> None:
    script = importlib.import_module("serve_load")
    assert script.quantiles([float(i) for i in range(1, 101)]) == {"p50": 51.0, "p95": 96.0, "p99": 100.0}
    answers = [script.Answer(0.1, 1.1, 11), script.Answer(failed="status 503")]
    found = script.measured(answers, 2.0)
    assert found["tokens_per_second"] == 5.5
    assert found["tpot_ms"]["p50"] == 100.0
    assert found["failed"] == {"count": 1, "first": "status 503"}
