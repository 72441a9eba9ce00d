"""Which drafter ``drafter="auto"`` means for a machine, target and adapter.

``anabranch tune`` writes a profile with the drafter that it found. Without one, the costs of forward passes are
measured when a model is loaded, and kept. Both files are named after the hash of everything that the measurement
depends on, so those of another machine, another number of threads or another version are not found.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import torch

from anabranch.adapters.folder import LoadedAdapter
from anabranch.costs import PassCosts, known_costs, pass_costs, usual_costs
from anabranch.errors import CapabilityError, FileError, InputError, PerformanceWarning, one_line
from anabranch.files import cache_home, write_atomically
from anabranch.jsonfiles import read_json
from anabranch.methods import AUTO, StepCosts, check_spec, with_costs
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.processor import processor_name

__all__ = ["Choice", "Situation", "explain", "find_profile", "resolve", "save_profile"]

FORMAT = 2
DAYS = 30  # after which costs are measured again
Origin = Literal["given", "tuned", "measured when loaded", "remembered", "typical", "default on a GPU"]
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

_warned: WeakSet[Decoder] = WeakSet()  # targets whose costs could not be measured, which was said


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
        return cache_home() / "profiles" / f"{self._hash()}.json"

    def costs_path(self) -> Path:
        """Where the costs of forward passes are kept that were measured at load."""
        return cache_home() / "costs" / f"{self._hash()}.json"

    def _hash(self) -> str:
        named = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()[:16]


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


@dataclass(frozen=True)
class Choice:
    """What a drafter specification means here.

    drafter  the specification in full
    origin   "given": it did not ask for a choice; "tuned": from the profile of ``anabranch tune``; "measured when
             loaded" or "remembered": from costs of forward passes that were measured now or by an earlier load;
             "typical": from typical costs; "default on a GPU": nothing is measured there
    when     date of the measurement (ISO), where there was one
    busy     the machine was too busy to measure now
    """

    drafter: str
    origin: Origin
    when: str = ""
    busy: bool = False

    @property
    def sentence(self) -> str:
        """Why it is this drafter, for ``anabranch info`` and the like."""
        return {
            "given": "given by name",
            "tuned": "found by anabranch tune" + (f" on {self.when}" if self.when else ""),
            "measured when loaded": "chosen from the cost of forward passes, measured when the model was loaded",
            "remembered": f"chosen from the cost of forward passes, measured on {self.when}",
            "typical": "chosen from typical costs: the machine was too busy to measure; run 'anabranch tune' when "
            "nothing else runs",
            "default on a GPU": "the default on a GPU; 'anabranch tune' measures",
        }[self.origin]


def resolve(spec: str, target: Target, adapter: LoadedAdapter | None) -> str:
    """The drafter that ``spec`` means here, in full; see ``explain``."""
    return explain(spec, target, adapter).drafter


def explain(spec: str, target: Target, adapter: LoadedAdapter | None) -> Choice:
    """What ``spec`` means here, and why: "auto" is the profile's drafter; without a profile, what ``usual`` says.

    A ``tree=auto`` without costs takes those of the profile, else those measured. Warns (PerformanceWarning) where the
    machine is too busy to measure and no earlier measurement is kept.
    """
    if spec != AUTO and "tree=auto" not in spec:
        return Choice(spec, "given")
    situation = Situation.of(target, adapter)
    profile = find_profile(situation)
    if spec == AUTO and profile is not None:
        return Choice(str(profile["drafter"]), "tuned", str(profile.get("date", "")))
    if spec != AUTO:
        costs = (profile or {}).get("costs", {}).get("streams+prompt_lookup" if "+" in spec else "streams")
        if costs is not None:
            return Choice(with_costs(spec, StepCosts.parse(costs)), "tuned", str((profile or {}).get("date", "")))
        if "costs=" in spec:
            return Choice(spec, "given")
    if target.decoder.device.type != "cpu":
        return Choice(usual(target.decoder, streams=adapter is not None) if spec == AUTO else spec, "default on a GPU")
    origin, when = _settle(target, situation)
    chosen = usual(target.decoder, streams=adapter is not None) if spec == AUTO else spec
    if origin == "typical" and target.decoder not in _warned:
        _warned.add(target.decoder)
        warnings.warn(
            f"the machine is too busy to measure which drafts are fastest, so {spec!r} assumes typical costs"
            + (f" and means {chosen!r}" if spec == AUTO else "")
            + "; run 'anabranch tune' when nothing else runs",
            PerformanceWarning,
            stacklevel=2,
        )
    return Choice(chosen, origin, when, busy=origin == "typical")


def _settle(target: Target, situation: Situation) -> tuple[Origin, str]:
    """Know what forward passes of a target cost: from an earlier load, else measured; returns where from, and when."""
    path = replace(situation, adapter="").costs_path()  # adapters do not change what a pass of the target costs
    kept = _kept_costs(path)
    today = date.today()
    if kept is not None and (today - kept[1]).days <= DAYS:
        known_costs(target.decoder, PassCosts(kept[0]))
        return "remembered", kept[1].isoformat()
    found = known_costs(target.decoder)
    if not found.busy:
        _keep_costs(path, found.costs, today, target.decoder, situation)
        return "measured when loaded", today.isoformat()
    if kept is not None:
        known_costs(target.decoder, PassCosts(kept[0]))
        return "remembered", kept[1].isoformat()
    return "typical", ""


def _kept_costs(path: Path) -> tuple[StepCosts, date] | None:
    """Costs of forward passes that an earlier load measured, and when; None if there are none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return StepCosts.parse(found["costs"]), date.fromisoformat(found["date"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # ValueError: InputError too
        return None


def _keep_costs(path: Path, costs: StepCosts, when: date, target: Decoder, situation: Situation) -> None:
    """Keep measured costs for later loads, where the cache folder can be written; and what they make of auto."""
    record = {
        "costs": str(costs),
        "date": when.isoformat(),
        "situation": situation.__dict__,
        "drafter": usual(target, streams=bool(situation.adapter)),
    }
    with suppress(OSError):  # otherwise the next load measures again
        write_atomically(path, json.dumps(record) + "\n")


def usual(target: Decoder, *, streams: bool) -> str:
    """The drafter of ``USUAL`` with the most expected tokens a second, from the costs of passes; on a GPU the largest.

    ``streams`` says whether there is an adapter.
    """
    if target.device.type != "cpu":
        return "streams+prompt_lookup" if streams else "prompt_lookup"
    alone, whole = pass_costs(target), usual_costs(target)

    def rate(spec: str) -> float:
        rows, tokens = USUAL[spec]
        return tokens / float((whole if "streams" in spec else alone)(np.array(rows)))

    return max((spec for spec in USUAL if streams or "streams" not in spec), key=rate)
