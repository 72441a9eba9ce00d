"""research/serve_agents.py against a real server of a toy model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from served import TEMPLATE, running

RESEARCH = Path(__file__).resolve().parents[2] / "research"


def test_turns_of_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RESEARCH)
    script = importlib.import_module("serve_agents")
    monkeypatch.setattr(script, "ASKED", "a")
    monkeypatch.setattr(script, "SYSTEM", "s")
    monkeypatch.setitem(script.READ, "name", "r")
    monkeypatch.setattr(script, "recorded", lambda turns, count, tokens: [script.Call("1", {}, "xy")] * turns)
    out = tmp_path / "agents.json"
    with running(drafter="none") as server:
        server.service.model.tokenizer.chat_template = TEMPLATE
        words = ["--server", f"toy={server.url}", "--arms", "--turns", "2", "--new", "3", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["serve_agents.py", *words, "--forms", "responses", "messages", "chat"])
        script.main()
    result = json.loads(out.read_text())
    mine = result["summary"]["chat"]["toy"]
    assert (mine["turns"], mine["seconds_shared"]) == (2, mine["seconds"])
    assert set(result["summary"]) == {"responses", "messages", "chat"}
    first, second = (sorted(turn["prompt_tokens"] for turn in result["turns"] if turn["turn"] == n) for n in (1, 2))
    assert len(set(first)) == 1, "all forms are one conversation"
    assert len(set(second)) == 1
    assert second[0] > first[0]
    for turn in result["turns"]:
        assert 0 < turn["ttft_ms"] <= 1e3 * turn["seconds"] + 1  # both are rounded
        assert 0 < turn["new_tokens"] <= 3
    assert all(turn["cached_tokens"] > 0 for turn in result["turns"] if turn["turn"] == 2)


def test_turns_that_one_arm_leaves_out_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RESEARCH)
    script = importlib.import_module("serve_agents")
    same = {"form": "chat", "prompt_tokens": 9, "cached_tokens": 0, "ttft_ms": 1.0}
    arms = [("reuse", 1, 2.0), ("reuse", 2, 3.0), ("fresh", 2, 5.0)]
    found = script.summary([{**same, "arm": arm, "turn": turn, "seconds": seconds} for arm, turn, seconds in arms])[
        "chat"
    ]
    assert {arm: (each["turns"], each["seconds"], each["seconds_shared"]) for arm, each in found.items()} == {
        "reuse": (2, 5.0, 3.0),
        "fresh": (1, 5.0, 5.0),
    }
