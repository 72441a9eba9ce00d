"""What ``anabranch tune`` found out, kept a machine, target and adapter: the drafter that ``drafter="auto"`` means.

A profile's name is the hash of everything that the measurement depends on. One of another machine, another number of
threads or another version is simply not found, and then the usual drafter serves.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anabranch.drafters import AUTO, StepCosts, check_spec, with_costs
from anabranch.drafters.costs import pass_costs, usual_costs
from anabranch.errors import CapabilityError, FileError, InputError, one_line
from anabranch.files import cache_home, write_atomically
from anabranch.jsonfiles import read_json
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.processor import processor_name
from anabranch.streams.folder import LoadedAdapter

__all__ = ["Situation", "find_profile", "resolve", "save_profile"]

FORMAT = 2
# what "auto" may mean where nobody tuned: rows that a pass verifies, and tokens that it emits on prompts of many kinds
# (as replayed for benchmarks/tune-bf16-epyc-avx512-2cores-2026-11-22.json)
USUAL = {
    "none": (1, 1.0),
    "prompt_lookup:tokens=2": (3, 1.427),
    "prompt_lookup:tokens=3": (4, 1.499),
    "streams:tree=4+prompt_lookup": (4, 2.255),
    "streams:tree=5+prompt_lookup": (5, 2.465),
    "streams:tree=6+prompt_lookup": (6, 2.616),
    "streams:tree=8+prompt_lookup": (8, 2.776),
    "streams:tree=10+prompt_lookup": (10, 2.902),
    "streams:tree=12+prompt_lookup": (12, 3.004),
    "streams:tree=16+prompt_lookup": (16, 3.178),
    "streams:tree=20+prompt_lookup": (20, 3.279),
    "streams:tree=24+prompt_lookup": (24, 3.308),
}


@dataclass(frozen=True)
class Situation:
    """What a measurement of speed depends on."""

    fingerprint: str
    adapter: str
    dtype: str
    device: str
    processor: str
    threads: int
    kernels: str
    anabranch: str
    torch: str

    @staticmethod
    def of(target: Target, adapter: LoadedAdapter | None) -> Situation:
        """Of a target as it is loaded (and packed) here."""
        decoder = target.decoder
        on_gpu = decoder.device.type == "cuda"
        try:
            here = version("anabranch")
        except PackageNotFoundError:
            here = "unreleased"
        return Situation(
            fingerprint=target.fingerprint,
            adapter="" if adapter is None else str(adapter.record["sha256"]),
            dtype=str(decoder.dtype).removeprefix("torch.") if target.quantize == "none" else target.quantize,
            device=torch.cuda.get_device_name(decoder.device) if on_gpu else "cpu",
            processor=processor_name(),
            threads=torch.get_num_threads(),
            kernels="torch" if decoder.stack is None else decoder.stack.kernels.form,
            anabranch=here,
            torch=torch.__version__,
        )

    def path(self) -> Path:
        """Where its profile lies."""
        named = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True)
        return cache_home() / "profiles" / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def save_profile(situation: Situation, drafter: str, record: dict[str, Any]) -> Path:
    """Write what was chosen and why; returns where. Raises FileError if the cache folder cannot be written."""
    path = situation.path()
    try:
        whole = {"format": FORMAT, "drafter": drafter, "situation": situation.__dict__, **record}
        write_atomically(path, json.dumps(whole, indent=1) + "\n")
    except OSError as error:
        raise FileError(
            f"the profile cannot be written to {path} ({error.strerror}); set ANABRANCH_HOME to a folder that can"
        ) from error
    return path


def find_profile(situation: Situation) -> dict[str, Any] | None:
    """The profile of this situation, if there is one. Raises FileError where it is damaged."""
    path = situation.path()
    if not path.is_file():
        return None
    advice = "delete it, or run 'anabranch tune' again"
    found = read_json(path, advice)
    try:
        check_spec(found["drafter"])
        for costs in dict(found.get("costs") or {}).values():
            StepCosts.parse(costs)
    except (AttributeError, KeyError, TypeError, ValueError, InputError, CapabilityError) as error:
        raise FileError(f"{path} is no profile ({one_line(error)}); {advice}") from error
    return found


def resolve(spec: str, target: Target, adapter: LoadedAdapter | None) -> str:
    """What ``spec`` means here: "auto" the profile's drafter; without one, what is ``usual`` here.

    A ``tree=auto`` without costs takes those of the profile.
    """
    if spec != AUTO and "tree=auto" not in spec:
        return spec
    profile = find_profile(Situation.of(target, adapter))
    if spec == AUTO and profile is not None:
        return str(profile["drafter"])
    if spec != AUTO:
        costs = (profile or {}).get("costs", {}).get("streams+prompt_lookup" if "+" in spec else "streams")
        return spec if costs is None else with_costs(spec, StepCosts.parse(costs))
    return usual(target.decoder, streams=adapter is not None)


def usual(target: Decoder, *, streams: bool) -> str:
    """The one of ``USUAL`` that passes timed in a moment promise most of; on a GPU what drafts most.

    ``streams`` says whether there is an adapter.
    """
    if target.device.type != "cpu":
        return "streams+prompt_lookup" if streams else "prompt_lookup"
    alone, whole = pass_costs(target), usual_costs(target)

    def rate(spec: str) -> float:
        rows, tokens = USUAL[spec]
        return tokens / float((whole if "streams" in spec else alone)(np.array(rows)))

    return max((spec for spec in USUAL if streams or "streams" not in spec), key=rate)
