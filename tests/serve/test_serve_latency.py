"""research/serve_latency.py against real servers of a toy model, and what it found."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import sys
from pathlib import Path

import pytest

from anabranch.serve.run import bound
from anabranch.serve.settings import Settings
from toy_text import ToyFolders

RESEARCH = Path(__file__).resolve().parents[2] / "research"


def test_small_events_do_not_wait_for_acknowledgements() -> None:
    async def option() -> int:
        found = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bound(Settings(port=0)) as listening:
            async with await asyncio.start_server(connected, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                try:
                    return int(await found)
                finally:
                    writer.close()

    assert asyncio.run(option()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["overhead", "behind"])
def test_latencies_of_a_toy(mode: str, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(RESEARCH)
    script = importlib.import_module("serve_latency")
    suite, out = tmp_path / "suite.jsonl", tmp_path / "latency.json"
    suite.write_text("".join(json.dumps({"prompt": f"the thing {i}"}) + "\n" for i in range(3)))
    words = {"overhead": ["--suite", str(suite), "--new", "8"], "behind": ["--tokens", "300", "--rounds", "1"]}[mode]
    monkeypatch.setattr(sys, "argv", ["serve_latency.py", mode, "--model", str(toys.model), *words, "--out", str(out)])
    if mode == "behind":
        with pytest.raises(SystemExit, match="does not fit the context"):
            script.main()
        return
    script.main()
    found = json.loads(out.read_text())["overhead"]
    assert found["http"]["tokens"] == found["api"]["tokens"] > 0
