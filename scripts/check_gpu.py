"""Checks this project on a CUDA GPU and measures what decides speed there, in one command of at most nine minutes.

Each part prints its lines as it goes and adds them to --out, so a run that is cut short loses nothing; a part that
fails prints its error, and the others go on. None begins after --seconds.

    python scripts/check_gpu.py --out benchmarks/gpu-NAME-DATE.json

    fused      whether the fused kernels agree with their definitions, and steps with and without them
    tests      pytest -m cuda
    certify    plain and speculative decoding compared, on the default model if its file is at hand, else random weights
    launches   kernels launched, graphs replayed and values read by the host, per step; at most 300 kernels and one
               read are expected
    shapes     milliseconds of plain steps over the bandwidth floor, of passes of 1 to 64 nodes, of steps with streams
    prompts    tokens a second of reading a prompt
    rows       tokens a second of decoding many rows
    training   positions a second of training streams, by the size of a step and of a segment

--device cpu --tiny rehearses it without a GPU, on tiny shapes; tests/test_check_gpu.py does so on a simulated GPU too.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anabranch.analysis.cost import MODELS
from anabranch.bench.report import environment
from anabranch.bench.shape_tables import shape_record
from anabranch.bench.shapes import measure_shape
from anabranch.certify import certify
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import AnabranchError, FileError
from anabranch.learning.examples import Example
from anabranch.loading import LoadConfig, load
from anabranch.methods import make_drafter
from anabranch.methods.none import NoDrafter
from anabranch.model.decoder import Decoder
from anabranch.model.device import layers
from anabranch.model.device.cases import cases, difference
from anabranch.model.families import model_config
from anabranch.model.load import Target
from anabranch.model.weights import random_decoder
from anabranch.support.files import shown_command, write_atomically
from anabranch.train import train_adapter, trainable
from anabranch.train.trainer import Progress

SPECS = ("prompt_lookup", "streams:tree=8", "streams:tree=8,placement=ride", "streams:tree=auto+prompt_lookup")
LEAST = 20.0  # seconds that a part may need to be worth beginning
TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512}
TINY_STREAMS = {"stream_layers": 2, "adapter_rank": 4, "attention_rank": 4, "mlp_rank": 4, "conditioning_rank": 8}
TINY_STREAMS |= {"root_width": 8}


class Check:
    """The device, the shapes, and what was measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        device = torch.device(args.device)
        self.args, self.device = args, torch.device("cuda", device.index or 0) if device.type == "cuda" else device
        self.result: dict[str, Any] = {
            "command": shown_command("python", "scripts/check_gpu.py", *sys.argv[1:]),
            "environment": environment(self.device),
        }
        self.began = time.monotonic()

    def say(self, part: str, /, **values: Any) -> None:
        """Print a line and keep it."""
        self.result.setdefault(part, []).append(values)
        print(f"{time.monotonic() - self.began:6.1f} s  {part}  {json.dumps(values)}", flush=True)
        if self.args.out is not None:
            write_atomically(self.args.out, json.dumps(self.result, indent=1) + "\n")

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory back that nothing uses."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def config(self, name: str) -> dict[str, Any]:
        """The config of a shape of ``analysis.cost.MODELS``, as small as the rehearsal's where that was asked for."""
        return MODELS[name] | (TINY if self.args.tiny else {})

    def decoder(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
        """A shape with random weights."""
        config = replace(model_config(self.config(name)), eos_token_ids=())
        return random_decoder(config, dtype=dtype, device=self.device).eval().requires_grad_(False)


def streams(check: Check, target: Decoder) -> torch.nn.Module:
    """An adapter of the shipped shape with random weights."""
    trained = trainable("streams").trained
    assert trained is not None
    recipe = trained.training.recipe("default-adapter", TINY_STREAMS if check.args.tiny else {})
    vocabulary = torch.arange(min(8192, target.config.vocab_size))
    module: torch.nn.Module = trained.make(target.config, recipe.config, vocabulary)
    return module.to(target.device, target.dtype).eval().requires_grad_(False)


def tokens_of(target: Decoder, count: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(target.config.vocab_size, (count,), generator=generator).tolist()
    return found


def tests(check: Check) -> None:
    """The tests that need a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/test_gpu.py"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().split("\n")
    print("\n".join(lines[-100:]), done.stderr[-3000:], flush=True)
    check.say("tests", status=done.returncode, last=lines[-1])


def certified(check: Check) -> None:
    """Speculative against plain decoding, on the default model or on random weights of its shape."""
    for dtype in ("float32", "bfloat16"):
        try:
            if check.args.tiny:
                raise FileError("tiny shapes only")
            loaded = load(LoadConfig(dtype=dtype, device=check.args.device))
            target, modules, name = loaded.target, loaded.modules, "default"
        except AnabranchError as error:
            print(f"no default model here: {error}")
            decoder = check.decoder("SmolLM2-135M", getattr(torch, dtype))
            target, name = Target(decoder, None, decoder.config, "random", None, "0"), "random weights of its shape"
            modules = (streams(check, decoder),)
        prompts = [tokens_of(target.decoder, 20 + 7 * n, n) for n in range(2 if check.args.tiny else 12)]
        for spec in SPECS[:2] if check.args.tiny else SPECS:
            for rows in (2,) if check.args.tiny else (1, 4):
                began = time.monotonic()
                new = 8 if check.args.tiny else 48
                found = certify(target, modules, spec, prompts, max_new_tokens=new, rows=rows)
                seconds = round(time.monotonic() - began, 1)
                verdicts = Counter(each.verdict for each in found)
                check.say("certify", model=name, dtype=dtype, spec=spec, rows=rows, seconds=seconds, verdicts=verdicts)


def fused(check: Check) -> None:
    """The fused kernels against their definitions, and what they are worth."""
    _agreement(check)
    began = time.monotonic()
    trusted = layers.trusted(check.device)
    check.say("fused", trusted=trusted, seconds=round(time.monotonic() - began, 1))
    for name in ("Qwen2.5-0.5B", "Llama-2-7B"):
        target = check.decoder(name)
        for spec in ("none", "prompt_lookup:tokens=15"):
            found = {}
            for on in (True, False) if trusted else (False,):
                with mock.patch.object(layers, "_tried", return_value=on):
                    engine = Engine(target, make_drafter(spec, target), rows=1, capacity=1024)
                    engine.add(Request(tokens_of(target, 16, 0) * 16, 400))
                    found["fused" if on else "not fused"] = round(_ms(check, engine), 3)
                    engine.clear()
            check.say("fused", model=name, spec=spec, ms=found)
        del target, engine
        check.free()


def _agreement(check: Check) -> None:
    """The operations whose kernels differ from their definitions, and how."""
    try:
        from anabranch.model.device.kernels import KERNELS
    except ImportError:
        return
    for dtype in (torch.bfloat16, torch.float32):
        differ: dict[str, list[str]] = {}
        for case in cases(dtype, every=layers.EVERY):
            why = difference(case, KERNELS, check.device)[-1500:]
            differ.setdefault(case.name, []).extend(filter(None, [why]))
        check.say("agreement", dtype=str(dtype), differences=differ)


def _ms(check: Check, engine: Engine) -> float:
    """Milliseconds of a step, once its graphs are captured."""
    warm, steps = (4, 2) if check.args.tiny else (20, 60)
    for _ in range(warm):
        engine.step()
    check.wait()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    check.wait()
    return 1e3 * (time.perf_counter() - began) / steps


def launches(check: Check) -> None:
    """Launches and reads of the host per step, by PyTorch's profiler, once graphs are captured."""
    target = check.decoder("SmolLM2-135M")
    adapter = streams(check, target)
    for spec in ("none", "streams:tree=8", "streams:tree=8,placement=ride"):
        engine = Engine(target, make_drafter(spec, target, adapter), rows=1, capacity=1024)
        engine.add(Request(tokens_of(target, 64, 0), 800))
        for _ in range(6 if check.args.tiny else 20):
            engine.step()
        check.wait()
        steps = 2 if check.args.tiny else 10
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        check.wait()
        ms = 1e3 * (time.perf_counter() - began) / steps
        activities = [torch.profiler.ProfilerActivity.CPU]
        if check.device.type == "cuda" and torch.backends.cuda.is_built():  # not on the simulated device
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                engine.step()
            check.wait()
        counts = {event.key: event.count for event in profile.key_averages()}
        of = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync")
        of = (*of, "cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)")
        kept = {name: counts[name] / steps for name in of if name in counts}
        on_device = sum(e.count for e in profile.key_averages() if e.device_type == torch.profiler.DeviceType.CUDA)
        check.say("launches", spec=spec, ms=round(ms, 3), on_device=on_device / steps, **kept)
        longest = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:12]
        for event in longest:
            each = event.self_device_time_total / steps
            print(f"    {each:8.1f} us a step in {event.count / steps:6.1f} of {event.key[:90]}")
        engine.clear()


def shapes(check: Check) -> None:
    """Steps of several shapes."""
    names = ("SmolLM2-135M", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Llama-2-7B")
    how: dict[str, Any] = {"widths": (1, 2, 4, 8, 16, 32, 64), "batches": (1, 8), "contexts": (512,), "nodes": 16}
    if check.args.tiny:  # streams of the usual shape have twelve layers
        names, how = names[:1], {"widths": (1, 4), "batches": (1,), "contexts": (16,), "nodes": 4}
    for name in names:
        began = time.monotonic()
        config = check.config(name) | ({"num_hidden_layers": 12} if check.args.tiny else {})
        with mock.patch.dict(MODELS, {name: config}):
            rounds = 1 if check.args.tiny else 4
            shape = measure_shape(name, dtype=torch.bfloat16, device=check.device, rounds=rounds, **how)
        record = shape_record(shape)
        medians = [{**step, "ms": step["ms"][1]} for step in record.pop("steps")]
        print("\n".join(f"    {step}" for step in medians))
        check.say("shapes", seconds=round(time.monotonic() - began, 1), steps=medians, **record)
        check.free()


def prompts(check: Check) -> None:
    """Reading prompts of several lengths."""
    for name in ("Qwen2.5-0.5B", "Llama-2-7B"):
        target = check.decoder(name)
        for length in (24, 48) if check.args.tiny else (512, 4096):
            times = []
            for turn in range(3):
                scheduler = Scheduler(target, rows=1, prefix_bytes=0)
                ticket = scheduler.submit(Request(tokens_of(target, length - 2, turn), 1), NoDrafter())
                began = time.perf_counter()
                while scheduler.busy:
                    scheduler.tick()
                check.wait()
                times.append(time.perf_counter() - began)
                assert ticket.error is None
            check.say("prompts", model=name, tokens=length, tokens_per_second=round(length / min(times)))
        del target, scheduler
        check.free()


def rows(check: Check) -> None:
    """Plain decoding of many rows, prompts of 40 tokens included."""
    target = check.decoder("Qwen2.5-0.5B")
    for count in (1, 5) if check.args.tiny else (1, 64, 256):
        scheduler, new = Scheduler(target, rows=count, prefix_bytes=0), 6 if check.args.tiny else 96
        began = time.perf_counter()
        tickets = [
            scheduler.submit(Request(tokens_of(target, 40, n), new), NoDrafter()) for n in range(min(count, 256))
        ]
        read = 0.0
        while scheduler.busy:
            scheduler.tick()
            if not read and all(ticket.emitted for ticket in tickets):
                read = time.perf_counter() - began
        check.wait()
        seconds = time.perf_counter() - began
        done = sum(len(ticket.emitted) for ticket in tickets)
        check.say("rows", rows=count, tokens_per_second=round(done / seconds), all_started_after=round(read, 2))


def training(check: Check) -> None:
    """Steps of training streams of the shipped shape for the shape of a 0.5B model."""
    decoder = check.decoder("Qwen2.5-0.5B")
    target = Target(decoder, None, decoder.config, "random", None, "0")
    method = trainable("streams")
    assert method.trained is not None
    for size, segment in ((512, 64),) if check.args.tiny else ((2048, 128), (8192, 1024), (16384, 2048)):
        given: dict[str, Any] = {"segment": segment, "batch_tokens": size, "epochs": 1.0, "held_out": 8, "warmup": 1}
        if check.args.tiny:
            given |= TINY_STREAMS
        plan = method.trained.training.recipe("default-adapter", given)
        count = (3 if check.args.tiny else 6) * (size // 256) + 8
        examples = [Example(tuple(tokens_of(decoder, 40, n)), tuple(tokens_of(decoder, 216, n))) for n in range(count)]
        marks, losses = [], []

        def report(progress: Progress, marks: list[float] = marks, losses: list[float] = losses) -> None:
            marks.append(time.perf_counter())
            losses.append(round(progress.loss, 3))

        with tempfile.TemporaryDirectory() as folder:
            train_adapter(target, method, plan, examples, Path(folder) / "adapter", report=report)
        ended = time.perf_counter()
        each = [after - before for before, after in pairwise(marks)]
        peak = torch.cuda.max_memory_allocated() / 1e9 if check.device.type == "cuda" else 0.0
        check.say(
            "training", batch_tokens=size, segment=segment, seconds_of_steps=[round(one, 3) for one in each],
            losses=losses, positions_per_second=round(216 * (size // 256) / min(each)), peak_gb=round(peak, 2),
            seconds_after_the_last=round(ended - marks[-1], 2),
        )  # fmt: skip


PARTS: dict[str, Callable[[Check], None]] = {
    "fused": fused,
    "tests": tests,
    "launches": launches,
    "training": training,
    "rows": rows,
    "certify": certified,
    "shapes": shapes,
    "prompts": prompts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=sorted(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no part after that")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to rehearse on a CPU")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    check = Check(parser.parse_args())
    failed = False
    for part in check.args.parts:
        if (left := check.args.seconds - (time.monotonic() - check.began)) < LEAST:
            check.say("skipped", part=part, seconds_left=round(left, 1))
            continue
        print(f"{time.monotonic() - check.began:6.1f} s  == {part}", flush=True)
        try:
            with torch.inference_mode(part != "training"), warnings.catch_warnings():
                warnings.simplefilter("always")
                PARTS[part](check)
        except Exception as error:  # the other parts go on
            failed = True
            traceback.print_exc()
            check.say("failed", part=part, error=f"{type(error).__name__}: {error}"[:500])
        check.free()
    sys.exit(failed)


if __name__ == "__main__":
    main()
