"""The files that ``scripts/fuzz.py`` corrupts: toy files by kind, their mutations, and the calls that read both."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf_files import toy_model, write_gguf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import anabranch
from anabranch.adapters.folder import find_adapters
from anabranch.analysis.simulate import Cut, Latency, simulate
from anabranch.analysis.trace import TraceWriter, read_trace
from anabranch.api import Model
from anabranch.bench.compare import compare, comparison_table, read_result
from anabranch.bench.report import SCHEMA
from anabranch.bench.suites import load_suite
from anabranch.control.profiles import Situation
from anabranch.decoding.engine import Engine, Request
from anabranch.methods import make_drafter
from anabranch.model.load import Target, load_target
from anabranch.model.pack import pack_decoder
from anabranch.model.peft import write_lora
from anabranch.train.answers import read_prompts
from anabranch.train.checkpoint import load_checkpoint, save_checkpoint
from anabranch.train.data import read_examples, read_texts
from small import RICH, drawn_lora, randomise, small, small_adapter
from toy_text import VOCABULARY, save_toys

ROOT = Path(__file__).resolve().parents[1]
TEXT = "the thing of the thing"
NEW = 4

Random = random.Random


@dataclass(frozen=True)
class Kind:
    """One kind of file: ``make`` writes a valid one into a folder, ``spoil`` breaks a copy of it, ``use`` reads it."""

    make: Callable[[Path], None]
    spoil: Callable[[Path, Random], None]
    use: Callable[[Path], None]


# -- mutations -----------------------------------------------------------------------------------------------------
def odd_value(rng: Random) -> Any:
    """Something that a field does not expect."""
    deep: Any = []
    for _ in range(rng.choice((3, 50, 5000))):
        deep = [deep]
    values = [
        None, True, False, 0, -1, 1, 2, 3, 7, 2**15, 2**31, 2**32, 2**63, 2**64, 10**30, -(10**30), 0.0, -0.0, 0.5, 1.5,
        -2.5, 1e-300, 1e300, math.nan, math.inf, -math.inf, "", "128", "x", "x" * 10_000, "\ud800", "a\nb", "\0",
        "../../etc/passwd", [], {}, [[]], [None], [1, 2, 3], [-1], ["a"], {"a": 1}, {"": {}}, deep,
    ]  # fmt: skip
    return rng.choice(values)


def spoil_value(value: Any, rng: Random) -> Any:
    """A copy of a JSON value in which one thing is other than it was."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        changed, key = dict(value), rng.choice(list(value))
        action = rng.random()
        if action < 0.1:
            del changed[key]
        elif action < 0.15:
            changed[rng.choice(["extra", "", "a\nb", key + "_"])] = odd_value(rng)
        elif action < 0.2:
            changed[key] = value[rng.choice(list(value))]
        else:
            changed[key] = spoil_value(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        action = rng.random()
        if action < 0.15:
            return value[:at] + value[at + 1 :]
        if action < 0.3:
            return value + value[at:]
        return [*value[:at], spoil_value(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.3:
        return rng.choice((value + 1, value - 1, value * 2, -value, value * 1000, str(value), [value], value + 0.5))
    return odd_value(rng)


def spoil_bytes(data: bytes, rng: Random) -> bytes:
    """A copy with bits flipped, or bytes lost, doubled or overwritten; mostly near the beginning, where headers are."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        end = len(out) if rng.random() < 0.5 else min(len(out), 4096)
        at, length = rng.randrange(end + 1), rng.choice((1, 1, 2, 4, 8, 64))
        action = rng.randrange(7)
        if action == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del out[at:]
        elif action == 2:
            del out[at : at + length]
        elif action == 3:
            out[at:at] = rng.randbytes(length)
        elif action == 4:
            out[at : at + length] = rng.choice((b"\0", b"\xff")) * len(out[at : at + length])
        elif action == 5:
            out[at:at] = out[at : at + length]
        elif at + 8 <= len(out):
            wide = rng.choice((0, 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, len(out)))
            struct.pack_into("<Q", out, at, wide)
    return bytes(out)


def spoil_json(path: Path, rng: Random) -> None:
    """A JSON file: values, or now and then bytes."""
    if rng.random() < 0.15:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
        return
    value = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = spoil_value(value, rng)
    path.write_text(_dumped(value), encoding="utf-8")


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except RecursionError:  # a nest that is too deep to be written as it is read
        return "[" * 200_000


def spoil_lines(path: Path, rng: Random) -> None:
    """A JSONL file: one line of it."""
    if rng.random() < 0.15:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    at = rng.randrange(len(lines))
    action = rng.random()
    if action < 0.1:
        lines[at] = rng.choice(("", "null", "[" * 100_000, "9" * 5000, lines[at][: len(lines[at]) // 2], lines[at] * 2))
    elif action < 0.15:
        lines.append(lines[at])
    else:
        lines[at] = _dumped(spoil_value(json.loads(lines[at]), rng))
    path.write_text("\n".join(lines) + rng.choice(("\n", "")), encoding="utf-8")
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))


def spoil_tensors(path: Path, rng: Random) -> None:
    """A safetensors file: its bytes, its header, or tensors of other types, shapes and values."""
    action = rng.random()
    data = path.read_bytes()
    if action < 0.25:
        path.write_bytes(spoil_bytes(data, rng))
    elif action < 0.5:
        (length,) = struct.unpack("<Q", data[:8])
        header = _dumped(spoil_value(json.loads(data[8 : 8 + length]), rng)).encode()
        stated = len(header) if rng.random() < 0.9 else rng.choice((0, 2**40, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", stated) + header + data[8 + length :])
    else:
        tensors = load_file(path)
        for _ in range(rng.choice((1, 1, 3))):
            spoil_tensor(tensors, rng)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file({name: value.clone().contiguous() for name, value in tensors.items()}, path, metadata)


def spoil_tensor(tensors: dict[str, torch.Tensor], rng: Random) -> None:
    """One tensor of a file."""
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    action = rng.randrange(9)
    if action == 0:
        del tensors[name]
        tensors.setdefault("left", torch.zeros(1))
    elif action == 1:
        tensors[rng.choice(("extra", name + ".more", "a\nb"))] = torch.zeros(3)
    elif action == 2:
        types = (torch.int32, torch.int8, torch.bool, torch.float16, torch.float64, torch.bfloat16, torch.uint8)
        tensors[name] = value.to(rng.choice(types))
    elif action == 3:
        tensors[name] = value.flatten()
    elif action == 4:
        tensors[name] = value[: len(value) // 2] if value.dim() else value
    elif action == 5:
        tensors[name] = value.t() if value.dim() == 2 else value[None]
    elif action == 6:
        tensors[name] = torch.zeros(0)
    else:
        filled = value.clone()
        flat = filled.view(-1)
        odd = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, 1e5, 0.0)
        if flat.numel() and value.is_floating_point():
            flat[rng.randrange(flat.numel()) if rng.random() < 0.5 else slice(None)] = rng.choice(odd)
        elif flat.numel():
            flat[rng.randrange(flat.numel())] = rng.choice((-1, 2**31 - 1, 0))
        tensors[name] = filled


# -- what is read --------------------------------------------------------------------------------------------------
def decode(model: Model) -> None:
    """A few tokens, greedy and drawn."""
    model.generate(TEXT, max_new_tokens=NEW)
    model.generate([1, 2, 3], max_new_tokens=NEW, temperature=1.0, top_p=0.9)


def use_model(folder: Path) -> None:
    decode(anabranch.load(folder / "model", drafter="none", device="cpu"))


def use_tokenizer(folder: Path) -> None:
    model = anabranch.load(folder / "model", drafter="none", device="cpu")
    model.generate(TEXT, max_new_tokens=NEW)
    if model.tokenizer.chat_template:
        model.chat([{"role": "user", "content": "the"}], max_new_tokens=NEW)


def use_gguf(folder: Path) -> None:
    decode(anabranch.load(folder / "model.gguf", drafter="none", device="cpu", dtype="float32"))


SEEDS = Path(os.environ.get("ANABRANCH_FUZZ_SEEDS", ""))


@cache
def toy_target() -> Target:
    target = load_target(str(SEEDS / "adapters" / "model"), device="cpu")
    pack_decoder(target.decoder)
    return target


def use_adapter(folder: Path) -> None:
    target = toy_target()
    loaded = find_adapters(target, [folder / "adapter"])
    decode(Model(target, loaded, "streams:tree=best,nodes=8"))


def make_lora(folder: Path) -> None:
    make_toys(folder)
    lora = drawn_lora(load_target(str(folder / "model"), device="cpu").config)
    write_lora(folder / "lora", lora, base="toy")
    record = folder / "lora" / "adapter_config.json"
    described = {**json.loads(record.read_text(encoding="utf-8")), "rank_pattern": {r"layers\.1\..*q_proj": 3}}
    record.write_text(json.dumps(described), encoding="utf-8")


def use_lora(folder: Path) -> None:
    decode(anabranch.load(folder / "model", lora=folder / "lora", drafter="none", device="cpu"))


def spoil_lora(folder: Path, rng: Random) -> None:
    if rng.random() < 0.5:
        spoil_json(folder / "lora" / "adapter_config.json", rng)
    else:
        spoil_tensors(folder / "lora" / "adapter_model.safetensors", rng)


def use_profile(folder: Path) -> None:
    os.environ["ANABRANCH_HOME"] = str(folder)
    target = toy_target()
    path = Situation.of(target).path()
    path.parent.mkdir(exist_ok=True)
    shutil.copy(folder / "profile.json", path)
    decode(Model(target, drafter="auto"))
    Model(target, drafter="auto").generate(TEXT, max_new_tokens=NEW, drafter="prompt_lookup")


def use_trace(folder: Path) -> None:
    trace = read_trace(folder / "trace.jsonl")
    trace.rows()
    trace.sources()
    Latency.of(trace)
    simulate(trace, Cut(nodes=4))


def use_latency(folder: Path) -> None:
    latency = Latency.read(folder / "latency.json")
    latency(3)


def use_prompts(folder: Path) -> None:
    read_prompts(folder / "prompts.jsonl", toy_target().tokenizer)


def use_answers(folder: Path) -> None:
    read_examples(folder / "answers.jsonl", vocab_size=VOCABULARY, max_tokens=64)


def use_texts(folder: Path) -> None:
    read_texts(folder / "texts.jsonl", toy_target().tokenizer, max_tokens=64)


def use_suite(folder: Path) -> None:
    load_suite(str(folder / "suite.jsonl"))


def use_result(folder: Path) -> None:
    broken, whole = read_result(folder / "result.json"), read_result(SEEDS / "results" / "result.json")
    for pair in ((broken, whole), (whole, broken)):
        comparison_table(compare(*pair))


def use_checkpoint(folder: Path) -> None:
    module = small_adapter(small()).requires_grad_(True)
    load_checkpoint(folder / "run", module, _optimizer(module))


# -- valid files ---------------------------------------------------------------------------------------------------
def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def make_toys(folder: Path) -> None:
    save_toys(folder, native=True)  # so that what is accepted meets the native kernels


def make_gguf(folder: Path) -> None:
    write_gguf(folder / "model.gguf", "llama", toy_model("llama"), quantize=True)


def make_profile(folder: Path) -> None:
    costs = {"pass": "1:8.7/8:9.4/16:11.2", "draft": "2:0.4/8:0.6", "prepare": "1:1.2/4:1.9"}
    record = {"format": 3, "drafter": "prompt_lookup:tokens=3", "costs": costs, "date": "2026-01-02", "speedup": 1.5}
    (folder / "profile.json").write_text(json.dumps(record), encoding="utf-8")


def make_trace(folder: Path) -> None:
    decoder = small()
    with TraceWriter(folder / "trace.jsonl", settings={"prompts": 2}) as writer:
        engine = Engine(
            decoder, make_drafter("streams:nodes=6,k=3", decoder, small_adapter(decoder, RICH)), capacity=64
        )
        for first in (3, 5):
            engine.add(Request([first, 4, 7], 16))
            for step in engine.run():
                writer.add(step)


def make_latency(folder: Path) -> None:
    (folder / "latency.json").write_text('{"1": 10.2, "8": 12.0, "16": 14.0}', encoding="utf-8")


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_lines(folder: Path) -> None:
    chat = [{"role": "user", "content": "the thing"}, {"role": "assistant", "content": "so"}]
    _write_lines(
        folder / "prompts.jsonl",
        [{"prompt": "the", "id": 7, "source": "a"}, {"messages": chat}, {"prompt": "x", "chat": False, "id": "n"}],
    )
    ids = list(range(20))
    _write_lines(
        folder / "answers.jsonl", [{"id": i, "source": "a", "prompt_ids": ids[:5], "answer_ids": ids} for i in range(3)]
    )
    _write_lines(folder / "texts.jsonl", [{"text": "the thing " * 9, "source": "a"}, {"text": "of the " * 20}])
    _write_lines(folder / "suite.jsonl", [{"prompt": "the", "task": "a", "id": 1}, {"prompt": ["x", "y"]}])


def make_result(folder: Path) -> None:
    for path in sorted((ROOT / "benchmarks").glob("spec-bench*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("schema") == SCHEMA and len(record.get("contenders", [])) < 9:
            shutil.copy(path, folder / "result.json")
            return
    raise FileNotFoundError("benchmarks/ has no result of this version's schema")


def make_checkpoint(folder: Path) -> None:
    module = small_adapter(small()).requires_grad_(True)
    randomise(module, seed=3)
    optimizer = _optimizer(module)
    sum(parameter.square().sum() for parameter in module.parameters()).backward()
    optimizer.step()
    save_checkpoint(folder / "run", module, optimizer, {"step": 3, "options": {"a": 1}, "streams": RICH.to_dict()})


# -- which file of a folder is broken ------------------------------------------------------------------------------
def in_file(name: str, spoil: Callable[[Path, Random], None]) -> Callable[[Path, Random], None]:
    return lambda folder, rng: spoil(folder / name, rng)


TEMPLATES = (
    "{% for",
    "{{ 1 / 0 }}",
    "{{ messages.x.y.z }}",
    "{{ ''.__class__.__mro__ }}",
    "",
    "\0",
    "{{ raise_exception('no') }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% include 'x' %}",
    "{{ '\ud83d' }}",
    "{{ 'x' * 10**12 }}",
)


def spoil_tokenizer(folder: Path, rng: Random) -> None:
    name = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
    path = folder / "model" / name
    if name.endswith(".jinja"):
        path.write_bytes(rng.choice(TEMPLATES).encode("utf-8", "surrogatepass"))
        return
    spoil_json(path, rng)


def spoil_adapter(folder: Path, rng: Random) -> None:
    adapter = folder / "adapter"
    record = adapter / "adapter_config.json"
    if rng.random() < 0.5:
        spoil_json(record, rng)
        return
    weights = adapter / "adapter.safetensors"
    spoil_tensors(weights, rng)
    if rng.random() < 0.95:  # a digest that fits, so that what is inside is looked at
        described = json.loads(record.read_text(encoding="utf-8"))
        described["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        record.write_text(json.dumps(described), encoding="utf-8")


def spoil_gguf(folder: Path, rng: Random) -> None:
    path = folder / "model.gguf"
    path.write_bytes(spoil_bytes(path.read_bytes(), rng))


KINDS: dict[str, Kind] = {
    "adapters": Kind(make_toys, spoil_adapter, use_adapter),
    "configs": Kind(make_toys, in_file("model/config.json", spoil_json), use_model),
    "generation": Kind(make_toys, in_file("model/generation_config.json", spoil_json), use_model),
    "tokenizers": Kind(make_toys, spoil_tokenizer, use_tokenizer),
    "safetensors": Kind(make_toys, in_file("model/model.safetensors", spoil_tensors), use_model),
    "gguf": Kind(make_gguf, spoil_gguf, use_gguf),
    "loras": Kind(make_lora, spoil_lora, use_lora),
    "profiles": Kind(make_profile, in_file("profile.json", spoil_json), use_profile),
    "traces": Kind(make_trace, in_file("trace.jsonl", spoil_lines), use_trace),
    "latency": Kind(make_latency, in_file("latency.json", spoil_json), use_latency),
    "prompts": Kind(make_lines, in_file("prompts.jsonl", spoil_lines), use_prompts),
    "answers": Kind(make_lines, in_file("answers.jsonl", spoil_lines), use_answers),
    "texts": Kind(make_lines, in_file("texts.jsonl", spoil_lines), use_texts),
    "suites": Kind(make_lines, in_file("suite.jsonl", spoil_lines), use_suite),
    "checkpoints": Kind(make_checkpoint, in_file("run/checkpoint.safetensors", spoil_tensors), use_checkpoint),
    "results": Kind(make_result, in_file("result.json", spoil_json), use_result),
}
