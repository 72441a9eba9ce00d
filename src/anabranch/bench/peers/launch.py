"""Start a peer for a target: choose its weights, interpreter and environment variables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.peers.catalogue import PeerSpec, parse_peer
from anabranch.bench.peers.environments import environment_folder, find_python
from anabranch.bench.peers.process import Peer, PeerError
from anabranch.errors import CapabilityError
from anabranch.model.load import Target
from anabranch.sampling import SamplingParams

__all__ = ["open_peer"]

_EXPORT_SECONDS = 1800.0
_EXPORT = "from optimum.commands.optimum_cli import main; main()"


def open_peer(
    name: str, target: Target, *, sampling: SamplingParams, threads: int, capacity: int, timeout: float = 300.0
) -> Peer:
    """Start the peer ``name`` (with options) and let it load the target's weights.

    capacity  maximum number of tokens of a sequence, including the prompt
    timeout   seconds for loading, and for decoding one prompt

    Raises InputError for an unknown name or option, CapabilityError if the peer is not installed or does not support
    this target, and PeerError if it does not start.
    """
    spec, settings = parse_peer(name)
    _check(spec, settings, target, sampling)
    python = Path(sys.executable) if spec.environment is None else find_python(spec.environment)
    model = _weights(spec, settings, target, python)
    load = {
        **settings,
        "model": str(model),
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "device": str(target.decoder.device),
        "threads": threads,
        "capacity": capacity,
    }
    return Peer(
        name,
        [str(python), "-m", f"servers.{spec.server}"],
        load,
        sampling=sampling,
        eos=target.config.eos_token_ids,
        vocabulary=target.config.vocab_size,
        environment=_environment(threads),
        timeout=timeout,
    )


def _check(spec: PeerSpec, settings: dict[str, Any], target: Target, sampling: SamplingParams) -> None:
    if sampling.min_p or sampling.repetition_penalty != 1 or sampling.processors:
        raise CapabilityError(
            "peers are compared with temperature, top-k and top-p only; leave min_p, repetition_penalty and "
            "processors at their defaults"
        )
    device = target.decoder.device.type
    if device not in spec.devices:
        raise CapabilityError(f"the peer {spec.name!r} runs on the CPU here, the target on {device}; use --device cpu")
    if settings.get("speculative") == "draft_simple":
        draft = settings.get("draft")
        if draft is None or not Path(draft).expanduser().is_file():
            raise CapabilityError(
                f"the peer {spec.name!r} needs a draft model with the same vocabulary, got {draft}; name its file as "
                f"{spec.name}:draft=FILE.gguf"
            )
        settings["draft"] = str(Path(draft).expanduser().resolve())
    if settings.get("method") == "assisted":
        assistant = settings.get("assistant")
        if assistant is None:
            raise CapabilityError(
                f"the peer {spec.name!r} needs a draft model with the same vocabulary; name its folder as "
                f"{spec.name}:assistant=FOLDER"
            )
        folder = Path(assistant).expanduser()
        if not (folder / "config.json").is_file():
            raise CapabilityError(f"the draft model {assistant} is not a model folder; give a folder with a config")
        settings["assistant"] = str(folder.resolve())


def _environment(threads: int) -> dict[str, str]:
    """Our environment variables without our import path, and those that engines read at their start."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {
        "PYTHONPATH": str(Path(__file__).resolve().parent),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _weights(spec: PeerSpec, settings: dict[str, Any], target: Target, python: Path) -> Path:
    if target.lora is not None:
        raise CapabilityError(
            f"the peer {spec.name!r} reads {target.name!r} from its files, without the LoRA; save the merged model "
            "as a folder and measure that, or leave out --lora or --peer"
        )
    if spec.weights == "gguf":
        return _gguf(spec, settings, target)
    if spec.weights == "openvino" and target.path is not None:
        return _exported(target.path.resolve(), target.fingerprint, settings["format"], python)
    if target.path is None or not target.path.is_dir():
        raise CapabilityError(
            f"the peer {spec.name!r} needs a model folder with config and safetensors, which {target.name!r} is not; "
            "use the peer llama.cpp for a GGUF file"
        )
    return target.path.resolve()


def _gguf(spec: PeerSpec, settings: dict[str, Any], target: Target) -> Path:
    """The file given by the option, the target itself, or the file that the default model was converted from."""
    if chosen := settings.pop("gguf", None):
        path = Path(chosen).expanduser().resolve()
        if not path.is_file():
            raise CapabilityError(f"there is no GGUF file {chosen}; name an existing one as {spec.name}:gguf=FILE")
        return path
    if target.path is not None and target.path.is_file():
        return target.path.resolve()
    if target.path is not None and spec.environment is not None and (member := _converted_from(target.path)):
        for path in environment_folder(spec.environment).glob(f"[Ll]ib/**/site-packages/{member}"):
            return path
    raise CapabilityError(
        f"the peer {spec.name!r} reads GGUF files, and the one of {target.name!r} is not known; name it as "
        f"{spec.name}:gguf=FILE, or measure the model from its .gguf file"
    )


def _converted_from(folder: Path) -> str | None:
    """The file in a wheel that a folder was converted from, as recorded by ``fetch``."""
    try:
        member = json.loads((folder / "provenance.json").read_text(encoding="utf-8")).get("member")
    except (OSError, ValueError, AttributeError):
        return None
    return member if isinstance(member, str) and ".." not in member else None


def _exported(model: Path, fingerprint: str, weight_format: str, python: Path) -> Path:
    """OpenVINO's export of a model folder or a GGUF file, created once for each weight format.

    A GGUF file is exported from its dequantised weights, since OpenVINO's own reader of such files knows few formats.
    """
    final = environment_folder("openvino") / "exports" / f"{fingerprint[:16]}-{weight_format}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=final.parent))
    options = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    if weight_format == "int4":
        options += ["--group-size", "64"]  # its default of 128 does not divide the widths of small models
    try:
        source = _dequantised(model, staging / "source") if model.is_file() else model
        command = [str(python), "-c", _EXPORT, "export", "openvino", "-m", str(source), *options]
        command.append(str(staging / "model"))
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=staging,
            env=_environment(os.cpu_count() or 1),
            timeout=_EXPORT_SECONDS,
            check=False,
        )
        if done.returncode or not (staging / "model" / "openvino_model.xml").is_file():
            lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
            raise PeerError(f"the peer 'openvino' could not export the model: {' | '.join(lines[-3:]) or 'no message'}")
        os.replace(staging / "model", final)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"the export for 'openvino' took more than {_EXPORT_SECONDS:g} s and was stopped") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _dequantised(file: Path, folder: Path) -> Path:
    """Write a GGUF file as a folder of dequantised weights in bf16."""
    from anabranch.model.fetch import write_folder
    from anabranch.model.gguf import read_gguf

    write_folder(read_gguf(file, dtype=torch.bfloat16), folder)
    return folder
