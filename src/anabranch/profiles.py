"""What steps cost on this machine: measured by ``anabranch tune``, or else when a model is loaded, and kept.

Both files are named after the hash of everything that the measurement depends on, so those of another machine, another
number of threads or another version are not found.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch

from anabranch.adapters.folder import LoadedAdapter
from anabranch.costs import Costs, PassCosts, StepCosts, costs_of, known_costs
from anabranch.errors import FileError, InputError, PerformanceWarning, one_line
from anabranch.files import cache_home, write_atomically
from anabranch.jsonfiles import read_json, shown
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.processor import processor_name

__all__ = ["Known", "Situation", "find_profile", "save_profile", "settle"]

FORMAT = 3
DAYS = 30  # after which costs are measured again
Origin = Literal["tuned", "measured when loaded", "remembered", "typical", "default on a GPU"]
_warned: WeakSet[Decoder] = WeakSet()  # targets whose costs could not be measured, and a warning said so


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
    def of(target: Target, adapters: Sequence[LoadedAdapter] = ()) -> Situation:
        """Of a target as it is loaded (and packed) here."""
        decoder = target.decoder
        on_gpu = decoder.device.type == "cuda"
        try:
            here = version("anabranch")
        except PackageNotFoundError:
            here = "unreleased"
        return Situation(
            fingerprint=target.fingerprint,
            adapter="+".join(sorted(str(adapter.record["sha256"]) for adapter in adapters)),
            dtype=str(decoder.dtype).removeprefix("torch.") if target.quantize == "none" else target.quantize,
            device=torch.cuda.get_device_name(decoder.device) if on_gpu else "cpu",
            processor=processor_name(),
            threads=torch.get_num_threads(),
            kernels="torch" if decoder.stack is None else decoder.stack.kernels.form,
            anabranch=here,
            torch=torch.__version__,
        )

    def path(self) -> Path:
        """The file of its profile."""
        return cache_home() / "profiles" / f"{self._hash()}.json"

    def costs_path(self) -> Path:
        """The file of the costs that were measured when a model was loaded."""
        return cache_home() / "costs" / f"{self._hash()}.json"

    def _hash(self) -> str:
        named = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()[:16]


def save_profile(situation: Situation, *, costs: Mapping[str, str], drafter: str, record: Mapping[str, Any]) -> Path:
    """Write what was measured; returns where. Raises FileError if the cache folder cannot be written.

    costs    "pass": milliseconds by nodes; "draft": of a draft for one row by nodes drafted; "prepare": of what follows
             the pass by depth; each as ``StepCosts`` reads it
    drafter  the fastest drafter for one prompt at a time
    record   whatever else is worth keeping
    """
    path = situation.path()
    whole = {"format": FORMAT, "costs": dict(costs), "drafter": drafter, "situation": situation.__dict__, **record}
    try:
        write_atomically(path, json.dumps(whole, indent=1) + "\n")
    except OSError as error:
        raise FileError(
            f"the profile cannot be written to {path} ({error.strerror}); set ANABRANCH_HOME to a folder that can"
        ) from error
    return path


def find_profile(situation: Situation) -> dict[str, Any] | None:
    """The profile of this situation, if there is one. Raises FileError for a damaged one."""
    path = situation.path()
    if not path.is_file():
        return None
    advice = "delete it, or run 'anabranch tune' again"
    found = read_json(path, advice)
    try:
        if not isinstance(found["drafter"], str):
            raise TypeError(f"the drafter is {shown(found['drafter'])}")
        for costs in dict(found["costs"]).values():
            StepCosts.parse(costs)
        _ = found["costs"]["pass"]
    except (AttributeError, KeyError, TypeError, ValueError, InputError) as error:
        raise FileError(f"{path} is no profile ({one_line(error)}); {advice}") from error
    return found


@dataclass(frozen=True)
class Known:
    """What steps cost here, and how that is known.

    origin  "tuned": by ``anabranch tune``; "measured when loaded" or "remembered": passes were timed now or by an
            earlier load; "typical": typical costs; "default on a GPU": nothing was measured there yet
    when    date of the measurement (ISO), if there was one
    """

    costs: Costs
    origin: Origin
    when: str = ""

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy to measure."""
        return self.origin == "typical"

    @property
    def sentence(self) -> str:
        """How it is known, for ``anabranch info`` and the like."""
        return {
            "tuned": "costs measured by anabranch tune" + (f" on {self.when}" if self.when else ""),
            "measured when loaded": "costs of forward passes measured when the model was loaded",
            "remembered": f"costs of forward passes measured on {self.when}",
            "typical": "typical costs: the machine was too busy to measure; run 'anabranch tune' when it is idle",
            "default on a GPU": "costs measured while decoding",
        }[self.origin]


def settle(target: Target, adapters: Sequence[LoadedAdapter] = ()) -> Known:
    """Know what steps of a target cost: from its profile, from an earlier load, or measured now.

    Warns (PerformanceWarning) where the machine is too busy to measure and no earlier measurement is kept.
    """
    situation = Situation.of(target, adapters)
    if (profile := find_profile(situation)) is not None:
        tables = {name: StepCosts.parse(text) for name, text in profile["costs"].items()}
        costs = Costs.tuned(tables["pass"], tables.get("draft"), tables.get("prepare"))
        return Known(costs, "tuned", str(profile.get("date", "")))
    if target.decoder.device.type != "cpu":
        return Known(costs_of(target.decoder), "default on a GPU")
    origin, when = _know_passes(target, situation)
    if origin == "typical" and target.decoder not in _warned:
        _warned.add(target.decoder)
        warnings.warn(
            "the machine is too busy to measure what forward passes cost, so drafts are sized by typical costs; run "
            "'anabranch tune' when it is idle",
            PerformanceWarning,
            stacklevel=2,
        )
    return Known(costs_of(target.decoder), origin, when)


def _know_passes(target: Target, situation: Situation) -> tuple[Origin, str]:
    """Know what passes of a target cost, from an earlier load or measured now; returns from where, and when."""
    path = replace(situation, adapter="").costs_path()  # adapters do not change what a pass of the target costs
    kept = _kept_costs(path)
    today = date.today()
    if kept is not None and (today - kept[1]).days <= DAYS:
        known_costs(target.decoder, kept[0])
        return "remembered", kept[1].isoformat()
    found = known_costs(target.decoder)
    if not found.busy:
        _keep_costs(path, found, today, situation)
        return "measured when loaded", today.isoformat()
    if kept is not None:
        known_costs(target.decoder, kept[0])
        return "remembered", kept[1].isoformat()
    return "typical", ""


def _kept_costs(path: Path) -> tuple[PassCosts, date] | None:
    """Costs of passes that an earlier load measured, and when; None if there are none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        costs = StepCosts.parse(found["costs"])
        row, node = float(found["row_ms"]), float(found["node_ms"])
        if not 0 <= row + node < 1e6:
            return None
        return PassCosts(costs, row_ms=row, node_ms=node), date.fromisoformat(found["date"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # ValueError: InputError too
        return None


def _keep_costs(path: Path, found: PassCosts, when: date, situation: Situation) -> None:
    """Keep measured costs for later loads, where the cache folder can be written."""
    record = {
        "costs": str(found.costs),
        "row_ms": found.row_ms,
        "node_ms": found.node_ms,
        "date": when.isoformat(),
        "situation": situation.__dict__,
    }
    with suppress(OSError):  # otherwise the next load measures again
        write_atomically(path, json.dumps(record) + "\n")
