"""What anabranch finds on this machine: versions, processor, kernels, caches, profiles. For bug reports."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from anabranch.adapters.folder import read_record, shipped
from anabranch.files import cache_home
from anabranch.model.fetch import DEFAULT_MODEL
from anabranch.native import build
from anabranch.native import library as native
from anabranch.processor import cgroup_quota, processor_flags, processor_name, set_threads, usable_cpus

__all__ = ["describe_installation"]

PACKAGES = ("anabranch", "torch", "transformers", "tokenizers", "safetensors", "numpy")
# what changes where anabranch keeps things, what it compiles, and how it runs
VARIABLES = (
    *("ANABRANCH_HOME", "ANABRANCH_NATIVE", "CXX", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY"),
    *("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
)
# what the kernels' forms need, and what the compiler makes use of besides
FEATURES = frozenset(("amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni")).union(
    *(features for features, _ in build.FORMS.values())
)


def describe_installation() -> dict[str, Any]:
    """Facts by group, as JSON values: versions, processor, kernels, caches, environment, auto.

    Loads no model. The kernels are compiled if they have not been, which takes about 20 seconds.
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
            "features": sorted(processor_flags() & FEATURES),
            "cpus": os.cpu_count(),
            "usable_cpus": usable_cpus(),
            "cpu_quota": cgroup_quota(),
            "threads": threads,
        },
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": kernels,
        "caches": _caches(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "auto": _auto(str(kernels["form"])),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels() -> dict[str, Any]:
    """The form that runs, why no better one and what to do about it, and the compiler."""
    found, shortfall = native.library(), native.shortfall()
    return {
        "form": "torch" if found is None else found.form,
        "forms": list(build.FORMS),
        "why": "" if shortfall is None else shortfall.why,
        "advice": "" if shortfall is None else shortfall.advice,
        "compiler": _compiler(),
    }


def _compiler() -> str | None:
    """The compiler's command, and the first line of what it says about itself; None where there is none."""
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
    """Bytes of the files below."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed meanwhile, or a link to nowhere
                total += os.stat(os.path.join(inside, name)).st_size
    return total


def _auto(kernels: str) -> dict[str, Any]:
    """What ``drafter="auto"`` means on this machine, by model: from profiles of ``anabranch tune``, and from costs that
    were measured when a model was loaded. Those of other machines, threads or versions are counted.
    """
    here = {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "anabranch": _version("anabranch") or "unreleased",
    }
    names = {record["target"]["fingerprint"]: str(record["target"]["name"]) for record in map(read_record, shipped())}
    found: dict[str, list[dict[str, Any]]] = {"profiles": [], "costs": []}
    others = 0
    for path in [path for kind in found for path in sorted((cache_home() / kind).glob("*.json"))]:
        kind = path.parent.name
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            situation = record["situation"]
            fits = {**here, "kernels": situation["kernels"]}.items() <= situation.items()
            used = {name: situation[name] for name in ("fingerprint", "dtype", "device", "kernels")}
            facts = {
                "drafter": str(record["drafter"]),
                "speedup": record.get("speedup"),
                "date": record.get("date"),
                **used,
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fits = False
        if fits and situation["kernels"] in (kernels, "torch"):
            found[kind].append({"model": names.get(str(used["fingerprint"])), **facts, "path": str(path)})
        else:
            others += kind == "profiles"
    return {"folder": str(cache_home() / "profiles"), **found, "other_profiles": others}
