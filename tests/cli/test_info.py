"""``anabranch info``: this machine, a model, an adapter."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anabranch.adapters.folder import SHIPPED
from anabranch.api import load
from anabranch.control.profiles import Situation, keep_tuned
from anabranch.installation import describe_installation
from anabranch.native import library as native
from anabranch.support.processor import processor_name
from toy_text import ToyFolders
from verbs import Anabranch

NAME = "smollm2-135m-instruct"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native.library()  # from the user's cache folder, and kept for this process
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def situation_here() -> dict[str, Any]:
    fingerprint = json.loads((SHIPPED / NAME / "adapter_config.json").read_text())["target"]["fingerprint"]
    situation = {"fingerprint": fingerprint, "adapter": "", "dtype": "bfloat16", "device": "cpu", "kernels": "torch"}
    situation |= {
        "build": "",
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return situation | {"anabranch": _own()}


def profile(home: Path, name: str, **changes: Any) -> None:
    situation = situation_here() | changes
    record = {
        "costs": {"pass": "1:7"},
        "drafter": "streams:nodes=9",
        "default": "auto",
        "speedup": 1.5,
        "situation": situation,
    }
    record["date"] = "2026-01-02"
    (home / "profiles").mkdir(parents=True, exist_ok=True)
    (home / "profiles" / name).write_text(json.dumps(record))


def _own() -> str:
    return describe_installation()["versions"]["anabranch"] or "unreleased"


def test_a_machine(anabranch: Anabranch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.model.load.load_target", None)  # a model is not loaded
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (home / "models").mkdir(parents=True)
    (home / "models" / "weights").write_bytes(bytes(2_500_000))
    facts = json.loads(anabranch("info", "--json").out)
    assert facts["versions"]["torch"] == version("torch")
    assert facts["processor"]["name"] == processor_name()
    assert facts["processor"]["threads"] == torch.get_num_threads()
    kernels = native.library()
    assert facts["kernels"]["instruction_set"] == ("torch" if kernels is None else kernels.instruction_set)
    assert facts["kernels"]["origin"] == ("" if kernels is None else "package" if native.packed() else "here")
    shortfall = native.shortfall()
    assert facts["kernels"]["why"] == ("" if shortfall is None else shortfall.why)
    assert facts["caches"]["home"] == str(home)
    assert facts["caches"]["bytes"]["models"] == 2_500_000
    assert facts["caches"]["default_model"] is False
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    shown = anabranch("info").out
    for words in ("Versions\n", f"torch            {version('torch')}\n", "2.5 MB\n", "'anabranch pull' downloads it"):
        assert words in shown
    assert "costs are measured when the model is loaded" in shown


def test_info_shows_tuned_profiles(anabranch: Anabranch, home: Path) -> None:
    profile(home, "here.json")
    profile(home, "another-machine.json", processor="another")
    profile(home, "another-number-of-threads.json", threads=1 + torch.get_num_threads())
    (home / "profiles" / "broken.json").write_text("[]")
    (home / "profiles" / "not-a-dict.json").write_text('{"situation": 3, "drafter": "none"}')
    auto = json.loads(anabranch("info", "--json").out)["auto"]
    assert [(p["model"], p["drafter"], p["speedup"]) for p in auto["profiles"]] == [("default", "streams:nodes=9", 1.5)]
    assert auto["other_profiles"] == 4
    said = "costs tuned on 2026-01-02; fastest was streams:nodes=9, 1.50 times plain decoding"
    assert said in " ".join(anabranch("info").out.split())


def test_costs_that_were_measured_at_load(anabranch: Anabranch, home: Path, toys: ToyFolders) -> None:
    known = load(toys.model, adapter=toys.adapter).known
    assert known.origin == "measured when loaded"
    (cost,) = json.loads(anabranch("info", "--json").out)["auto"]["costs"]
    assert cost["pass_ms"].startswith("1:")
    assert f"costs of forward passes measured at load on {cost['date']}" in " ".join(anabranch("info").out.split())
    again = load(toys.model, adapter=toys.adapter).known
    assert again.origin == "remembered"


def test_info_shows_the_speedup_of_each_drafter_of_auto(anabranch: Anabranch, home: Path) -> None:
    here = Situation(**situation_here())
    keep_tuned(here, {"eagle:tree=auto+prompt_lookup:tokens=auto": 1.5, "medusa:tree=auto": 1.75})
    keep_tuned(replace(here, processor="another"), {"medusa:tree=auto": 3.0})
    (home / "yields" / "broken.json").write_text('{"yields": {"1": 3}}')
    facts = json.loads(anabranch("info", "--json").out)["auto"]
    (yields,) = facts["yields"]
    assert (yields["model"], yields["dtype"]) == ("default", "bfloat16")
    assert yields["speedups"] == {"1": {"medusa:tree=auto": 1.75, "eagle:tree=auto+prompt_lookup:tokens=auto": 1.5}}
    assert {"streams", "eagle", "medusa"} <= set(facts["trained"])
    shown = " ".join(anabranch("info").out.split())
    assert "with 1 row medusa:tree=auto 1.75, eagle:tree=auto+prompt_lookup:tokens=auto 1.50 times plain" in shown


def test_a_machine_without_kernels(anabranch: Anabranch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.forget()
    monkeypatch.setenv("ANABRANCH_KERNELS", "none")
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.setenv("CXX", "nowhere -O3")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    try:
        kernels = json.loads(anabranch("info", "--json").out)["kernels"]
    finally:
        monkeypatch.undo()
        native.forget()
    assert (kernels["instruction_set"], kernels["origin"], kernels["compiler"]) == ("torch", "", None)
    assert "ANABRANCH_KERNELS is none" in kernels["why"]


@pytest.mark.parametrize("columns", [60, 80])
def test_it_fits(
    anabranch: Anabranch, toys: ToyFolders, monkeypatch: pytest.MonkeyPatch, columns: int, home: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    profile(home, "here.json")
    for what in ([], [toys.model], [NAME]):
        shown = anabranch("info", *what).out
        wide = [line for line in shown.splitlines() if len(line) > columns]
        assert what == [NAME] or not [line for line in wide if " " in line.strip()], "a path alone may be longer"
        assert all(line == line.rstrip() for line in shown.splitlines())


def test_an_adapter_by_name(anabranch: Anabranch) -> None:
    record = json.loads(anabranch("info", NAME, "--json").out)
    assert record["target"]["name"] == "default"
    shown = anabranch("info", NAME).out
    assert shown.startswith("# Speculative Streaming for default\n")
    assert "library_name" not in shown


def test_adapters_of_others(anabranch: Anabranch, tmp_path: Path) -> None:
    path, settings = tmp_path / "adapter_config.json", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    path.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "acme/tiny", **settings}))
    facts = json.loads(anabranch("info", tmp_path, "--json").out)
    assert (facts["base_model"], facts["rank"], facts["modules"], facts["layers"]) == ("acme/tiny", 8, "q_proj", "all")
    assert "acme/tiny" in anabranch("info", tmp_path).out
    path.write_text('{"peft_type": "IA3"}')
    done = anabranch("info", tmp_path)
    assert done.code == 1
    assert "is a PEFT IA3 folder" in done.err


def test_an_incomplete_record(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    record = json.loads((toys.adapter / "adapter_config.json").read_text())
    del record["parameters"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(record))
    done = anabranch("info", tmp_path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "is incomplete" in done.err


def odd(folder: Path, name: str) -> Path:
    """Something that is neither a model nor an adapter."""
    path = folder / name
    path.mkdir()
    if name == "no config":
        (path / "model.safetensors").touch()
    elif name == "no weights":
        (path / "config.json").write_text('{"model_type": "llama"}')
    elif name == "broken config":
        (path / "config.json").write_text("{")
    elif name == "unknown family":
        (path / "config.json").write_text('{"model_type": "mamba"}')
        save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    elif name == "LoRA without modules":
        (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    elif name.endswith("architecture"):
        from gguf import GGUFWriter

        path = path / "model.gguf"
        writer = GGUFWriter(str(path), "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif "file" in name:
        path = path / ("notes.gguf" if "GGUF" in name else "notes.txt")
        path.write_text("hello")
    return path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty folder", "neither adapter_config.json nor config.json"),
        ("no config", "neither adapter_config.json nor config.json"),
        ("no weights", "neither model.safetensors nor model.safetensors.index.json"),
        ("broken config", "is not JSON"),
        ("unknown family", "mamba"),
        ("LoRA without modules", "names no target_modules"),
        ("unknown architecture", "mamba"),
        ("a file", "is neither a folder nor a .gguf file"),
        ("a file called GGUF", "is not a GGUF file"),
    ],
)
def test_odd_inputs_are_refused_in_one_sentence(anabranch: Anabranch, tmp_path: Path, name: str, said: str) -> None:
    done = anabranch("info", odd(tmp_path, name), "--json")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert said in done.err
    assert f"error: {json.loads(done.out)['error']}\n" == done.err


def test_errors_are_json_too(anabranch: Anabranch) -> None:
    for words, kind, code in (
        (["info", ""], "InputError", 1),
        (["generate", "--json", "--threads", "0", "hello"], "InputError", 1),
        (["generate"], "UsageError", 2),
        (["simulate", "none.jsonl"], "FileError", 1),
        (["train", "streams"], "UsageError", 2),
        (["bench", "--no-such-option"], "UsageError", 2),
    ):
        done = anabranch(*words, "--json")
        assert (done.code, json.loads(done.out)["kind"]) == (code, kind)
        assert done.err == f"error: {json.loads(done.out)['error']}\n"
        assert anabranch(*[word for word in words if word != "--json"]).out == ""
