"""A description of this installation for bug reports: versions, processor, kernels, caches, profiles."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from anabranch.adapters.folder import read_record, shipped
from anabranch.control.profiles import Situation, read_choice
from anabranch.methods import AUTO, methods, resolve_spec
from anabranch.model.fetch import DEFAULT_MODEL
from anabranch.native import build
from anabranch.native import library as native
from anabranch.native.features import processor
from anabranch.native.recipe import INSTRUCTION_SETS
from anabranch.support.files import cache_home
from anabranch.support.processor import cgroup_quota, processor_name, set_threads, usable_cpus

__all__ = ["describe_installation"]

PACKAGES = ("anabranch", "torch", "transformers", "tokenizers", "safetensors", "numpy")
# variables that change where anabranch stores files, what it compiles, and how it runs
VARIABLES = (
    *("ANABRANCH_HOME", "ANABRANCH_KERNELS", "CXX", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY"),
    *("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
)


def describe_installation() -> dict[str, Any]:
    """Facts by group, as JSON values: versions, processor, kernels, caches, environment, auto.

    Loads no model. Compiles the kernels if the package has none, which takes about 20 seconds.
    """
    threads = set_threads(None)
    kernels = _kernels()
    return {
        "versions": {
            **{name: _version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "processor": {
            "name": processor_name(),
            "features": sorted(processor().features),
            "cpus": os.cpu_count(),
            "usable_cpus": usable_cpus(),
            "cpu_quota": cgroup_quota(),
            "threads": threads,
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": kernels,
        "caches": _caches(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "auto": _auto(str(kernels["instruction_set"])),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels() -> dict[str, Any]:
    """The kernels in use and where they come from, why not faster ones and what to do about it, and the compiler."""
    library, shortfall = native.library(), native.shortfall()
    return {
        "instruction_set": "torch" if library is None else library.instruction_set,
        "origin": "" if library is None else "package" if native.packed() else "here",
        "instruction_sets": list(INSTRUCTION_SETS),
        "why": "" if shortfall is None else shortfall.why,
        "advice": "" if shortfall is None else shortfall.advice,
        "compiler": _compiler(),
    }


def _compiler() -> str | None:
    """The compiler's command and the first line of its ``--version``; None without a compiler."""
    command = build.compiler()
    if command is None:
        return None
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return shlex.join(command)
    return ": ".join([shlex.join(command), *said.splitlines()[:1]])


def _caches() -> dict[str, Any]:
    home = cache_home()
    folders = sorted(path for path in home.iterdir() if path.is_dir()) if home.is_dir() else []
    return {
        "home": str(home),
        "writable": os.access(next(path for path in (home, *home.parents) if path.exists()), os.W_OK),
        "bytes": {folder.name: _size(folder) for folder in folders},
        "default_model": (home / "models" / DEFAULT_MODEL.folder / "config.json").is_file(),
    }


def _size(folder: Path) -> int:
    """The total size of all files in a folder, in bytes."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed in the meantime, or a broken link
                total += os.stat(os.path.join(inside, name)).st_size
    return total


def _auto(kernels: str) -> dict[str, Any]:
    """The drafters that "auto" chooses from, and measurements on this machine by model: step costs and yields.

    Profiles are written by ``anabranch tune``, costs of forward passes when a model is loaded, and yields while it
    decodes with adapters of several methods. Profiles of other machines, numbers of threads or versions are only
    counted.
    """
    here = {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "anabranch": _version("anabranch") or "unreleased",
    }
    names = {record["target"]["fingerprint"]: str(record["target"]["name"]) for record in map(read_record, shipped())}
    measured: dict[str, list[dict[str, Any]]] = {"profiles": [], "costs": [], "yields": []}
    others = 0
    for path in [path for kind in measured for path in sorted((cache_home() / kind).glob("*.json"))]:
        kind = path.parent.name
        fact = _measured(path, kind, here, {kernels, "torch"})
        if fact is not None:
            measured[kind].append({"model": names.get(fact["fingerprint"]), **fact})
        else:
            others += kind == "profiles"
    trained = [method.name for method in methods() if method.trained is not None]
    return {
        "drafter": str(resolve_spec(AUTO)),
        "trained": trained,
        "folder": str(cache_home() / "profiles"),
        **measured,
        "other_profiles": others,
    }


def _measured(path: Path, kind: str, here: dict[str, Any], kernels: set[str]) -> dict[str, Any] | None:
    """The contents of a file of a kind, as JSON values; None if it is damaged or was measured elsewhere."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        situation = Situation(**record["situation"])
        used = {name: str(getattr(situation, name)) for name in ("fingerprint", "dtype", "device", "kernels")}
        fact: dict[str, Any] = {"date": record.get("date"), **used, "path": str(path)}
        if kind == "yields":
            fact["speedups"] = _speedups(path)
        else:
            fact["pass_ms"] = str(record["costs"]["pass"] if kind == "profiles" else record["costs"])
        if kind == "profiles":
            chosen = {"drafter": str(record["drafter"]), "default": str(record["default"])}
            fact |= chosen | {"speedup": float(record["speedup"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return fact if here.items() <= asdict(situation).items() and situation.kernels in kernels else None


def _speedups(path: Path) -> dict[str, dict[str, float]]:
    """The speedup of each drafter over plain decoding, the best first, by the least rows at which it was seen.

    Raises ValueError for a damaged file.
    """
    kept = read_choice(path)
    if kept is None:
        raise ValueError("not yields of drafters")
    speedups = {}
    for rows, seen in kept[0].yields().items():
        best = sorted(seen, key=lambda drafter: -seen[drafter].speedup)
        speedups[str(rows)] = {drafter: round(seen[drafter].speedup, 3) for drafter in best}
    return speedups
