"""Measurements of speed stored on this machine: costs of steps, and yields of the drafters that "auto" chooses from.

Costs are measured by ``anabranch tune`` or when a model is loaded, yields (``control.choice``) while decoding.

Files are named by a hash of everything that the measurement depends on, so those of another machine, number of threads
or version are not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from anabranch.adapters.folder import LoadedAdapter
from anabranch.adapters.record import predicted_lengths
from anabranch.control.choice import Choice
from anabranch.control.controller import Controller
from anabranch.control.costs import BUSY, Costs, PassCosts, StepCosts, costs_of, known_costs, plain_ms
from anabranch.errors import FileError, InputError, PerformanceWarning, one_line
from anabranch.methods import AUTO, resolve_spec
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target
from anabranch.native.recipe import digest
from anabranch.support.files import cache_home, write_atomically
from anabranch.support.jsonfiles import read_json, shown
from anabranch.support.log import LOGGER, warn
from anabranch.support.processor import processor_name

__all__ = [
    "Known",
    "Situation",
    "find_profile",
    "keep_choice",
    "keep_tuned",
    "read_choice",
    "save_profile",
    "settle",
    "tuned_drafter",
]

FORMAT = 3
DAYS = 30  # until costs are measured again
T = TypeVar("T")
Origin = Literal["tuned", "measured when loaded", "remembered", "typical", "default on a GPU"]
_warned: WeakSet[Decoder] = WeakSet()  # targets for which a warning said that costs could not be measured


@dataclass(frozen=True)
class Situation:
    """Everything that a measurement of speed depends on.

    build  the digest of the native kernels' sources; empty where PyTorch computes
    """

    fingerprint: str
    adapter: str
    dtype: str
    device: str
    processor: str
    threads: int
    kernels: str
    build: str
    anabranch: str
    torch: str

    @staticmethod
    def of(target: Target, adapters: Sequence[LoadedAdapter] = ()) -> Situation:
        """The situation of a target as it is loaded and packed."""
        decoder = target.decoder
        on_gpu = decoder.device.type == "cuda"
        try:
            here = version("anabranch")
        except PackageNotFoundError:
            here = "unreleased"
        return Situation(
            fingerprint=target.fingerprint,
            adapter="+".join(sorted(str(adapter.record["sha256"]) for adapter in adapters)),
            dtype=(str(decoder.dtype).removeprefix("torch.") if target.quantize == "none" else target.quantize)
            + (", kv=int8" if decoder.quantized_cache else ""),
            device=torch.cuda.get_device_name(decoder.device) if on_gpu else "cpu",
            processor=processor_name(),
            threads=torch.get_num_threads(),
            kernels="torch" if decoder.backend.kernels is None else decoder.backend.kernels.instruction_set,
            build="" if decoder.backend.kernels is None else digest(),
            anabranch=here,
            torch=torch.__version__,
        )

    def path(self, kind: Literal["profiles", "costs", "yields"] = "profiles") -> Path:
        """The file of the profile, of the costs measured at load, or of the yields of the drafters of "auto"."""
        named = json.dumps({"format": FORMAT, **self.__dict__}, sort_keys=True)
        return cache_home() / kind / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def save_profile(situation: Situation, *, costs: Mapping[str, str], drafter: str, record: Mapping[str, Any]) -> Path:
    """Write a profile and return its path. Raises FileError if the cache folder is not writable.

    costs    milliseconds, each in the format of ``StepCosts``: "pass" by verified nodes, "draft" of one row by drafted
             nodes, "prepare" (after the pass) by depth
    drafter  the fastest drafter for one prompt at a time
    record   other fields to store
    """
    path = situation.path()
    whole = {"format": FORMAT, "costs": dict(costs), "drafter": drafter, "situation": situation.__dict__, **record}
    try:
        write_atomically(path, json.dumps(whole, indent=1) + "\n")
    except OSError as error:
        raise FileError(
            f"the profile cannot be written to {path} ({error.strerror}); set ANABRANCH_HOME to a writable folder"
        ) from error
    return path


def find_profile(situation: Situation) -> dict[str, Any] | None:
    """The profile of this situation, or None. Raises FileError for a damaged one."""
    path = situation.path()
    if not path.is_file():
        return None
    advice = "delete it, or run 'anabranch tune' again"
    profile = read_json(path, advice)
    try:
        if not isinstance(profile["drafter"], str):
            raise TypeError(f"the drafter is {shown(profile['drafter'])}")
        for tables in (profile["costs"], *dict(profile.get("times", {})).values()):
            for costs in dict(tables).values():
                StepCosts.parse(costs)
        _ = profile["costs"]["pass"]
    except (AttributeError, KeyError, TypeError, ValueError, InputError) as error:
        raise FileError(f"{path} is not a profile ({one_line(error)}); {advice}") from error
    return profile


def tuned_drafter(target: Target, adapters: Sequence[LoadedAdapter] = ()) -> str:
    """The drafter for one prompt at a time where none is named: that of the profile if "auto" was slower, else "auto".

    Raises FileError for a damaged profile.
    """
    profile = find_profile(Situation.of(target, adapters))
    return AUTO if profile is None else str(profile.get("default", AUTO))


@dataclass(frozen=True)
class Known:
    """The step costs and their origin.

    origin  "tuned": by ``anabranch tune``; "measured when loaded" or "remembered": passes were timed now or by an
            earlier load; "typical": not measured; "default on a GPU": not measured before decoding
    when    date of the measurement (ISO), if any
    choice  the yields of the drafters that "auto" chooses from; None where there is no choice
    cards   the mean acceptance lengths by nodes that adapters' cards predict, by method
    """

    costs: Costs
    origin: Origin
    when: str = ""
    choice: Choice | None = None
    cards: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def controller(self, target: Decoder) -> Controller:
        """A controller that begins with all of this; the costs are shared."""
        return Controller(self.costs, ragged=target.ragged, choice=self.choice, cards=self.cards)

    @property
    def busy(self) -> bool:
        """Return whether the machine was too busy to measure."""
        return self.origin == "typical"

    @property
    def sentence(self) -> str:
        """The origin as a sentence."""
        return {
            "tuned": "costs measured by anabranch tune" + (f" on {self.when}" if self.when else ""),
            "measured when loaded": "costs of forward passes measured when the model was loaded",
            "remembered": f"costs of forward passes measured on {self.when}",
            "typical": "typical costs: the machine was too busy to measure; run 'anabranch tune' when it is idle",
            "default on a GPU": "costs measured while decoding",
        }[self.origin]


def settle(target: Target, adapters: Sequence[LoadedAdapter] = ()) -> Known:
    """The step costs of a target: from its profile, from an earlier load, or measured now.

    Warns (PerformanceWarning) if the machine is too busy to measure and there is no earlier measurement.
    """
    situation = Situation.of(target, adapters)
    choice = _known_choice(situation, adapters)
    cards = {adapter.method.name: predicted_lengths(adapter.record) for adapter in adapters}
    if (profile := find_profile(situation)) is not None:
        return Known(_tuned(profile), "tuned", str(profile.get("date", "")), choice, cards)
    if target.decoder.device.type != "cpu":
        return Known(costs_of(target.decoder), "default on a GPU", choice=choice, cards=cards)
    origin, when = _know_passes(target, situation)
    LOGGER.debug("costs of forward passes: %s %s", origin, when)
    if origin == "typical" and target.decoder not in _warned:
        _warned.add(target.decoder)
        warn(
            "the machine is too busy to measure the cost of forward passes, so drafts are sized by typical costs; run "
            "'anabranch tune' when it is idle",
            PerformanceWarning,
            stacklevel=2,
        )
    return Known(costs_of(target.decoder), origin, when, choice, cards)


def _tuned(profile: Mapping[str, Any]) -> Costs:
    """The costs in a profile: of passes, and for each drafter that was timed of a draft of a dozen nodes."""

    def draft_ms(tables: Mapping[str, str]) -> float:
        sizes = {"draft": 12, "prepare": 4}  # nodes, and their depth
        return sum(
            float(StepCosts.parse(tables[name])(np.array(size))) for name, size in sizes.items() if name in tables
        )

    times = {"": profile["costs"], **profile.get("times", {})}
    drafts = {name: draft_ms(tables) for name, tables in times.items()}
    return Costs(PassCosts(StepCosts.parse(profile["costs"]["pass"])), drafts)


def keep_choice(situation: Situation, choice: Choice) -> None:
    """Store yields for later loads, if the cache folder is writable."""
    record = {"yields": choice.to_dict(), "date": date.today().isoformat(), "situation": situation.__dict__}
    with suppress(OSError):  # otherwise the next load begins with predictions
        write_atomically(situation.path("yields"), json.dumps(record) + "\n")


def keep_tuned(situation: Situation, speedups: Mapping[str, float]) -> None:
    """Store the speedups over plain decoding that ``anabranch tune`` measured, one prompt at a time."""
    kept = read_choice(situation.path("yields"))
    choice = Choice() if kept is None else kept[0]
    choice.measured(speedups)
    keep_choice(situation, choice)


def _read(path: Path, parse: Callable[[Any], T]) -> tuple[T, date] | None:
    """The contents of a file of measurements and its date; None if it is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return parse(record), date.fromisoformat(record["date"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # ValueError: InputError too
        return None


def read_choice(path: Path) -> tuple[Choice, date] | None:
    """Stored yields and their date; None if the file is missing or damaged."""
    return _read(path, lambda record: Choice.from_dict(record["yields"]))


def _known_choice(situation: Situation, adapters: Sequence[LoadedAdapter]) -> Choice | None:
    """Yields of the drafters that "auto" chooses from with these adapters; None where there is no choice."""
    if not resolve_spec(AUTO, *(adapter.module for adapter in adapters)).choices:
        return None
    kept = read_choice(situation.path("yields"))
    return Choice() if kept is None or (date.today() - kept[1]).days > DAYS else kept[0]


def _know_passes(target: Target, situation: Situation) -> tuple[Origin, str]:
    """Set the costs of a target's passes, from an earlier load or measured now; returns their origin and date.

    Where a pass over one row takes another time than it did, other jobs disturbed that load or disturb this one, and
    the costs are measured again.
    """
    path = replace(situation, adapter="").path("costs")  # the cost of a pass does not depend on adapters
    kept = _read(path, _pass_costs)
    today = date.today()
    if kept is not None and (today - kept[1]).days <= DAYS and _as_before(target.decoder, kept[0]):
        known_costs(target.decoder, kept[0])
        return "remembered", kept[1].isoformat()
    measured = known_costs(target.decoder)
    if not measured.busy:
        _keep_costs(path, measured, today, situation)
        return "measured when loaded", today.isoformat()
    if kept is not None:
        known_costs(target.decoder, kept[0])
        return "remembered", kept[1].isoformat()
    return "typical", ""


def _as_before(target: Decoder, kept: PassCosts) -> bool:
    """Return whether a pass over one row takes about as long as it did, where no source has to be read first."""
    return target.encoder is not None or 1 / BUSY < plain_ms(target) / kept.costs.ms[0] < BUSY


def _pass_costs(record: Mapping[str, Any]) -> PassCosts:
    """Costs of passes as ``_keep_costs`` stores them. Raises ValueError, KeyError or TypeError."""
    row, node = float(record["row_ms"]), float(record["node_ms"])
    if not 0 <= row + node < 1e6:
        raise ValueError(f"not milliseconds: {row}, {node}")
    return PassCosts(StepCosts.parse(record["costs"]), row_ms=row, node_ms=node)


def _keep_costs(path: Path, measured: PassCosts, when: date, situation: Situation) -> None:
    """Store measured costs for later loads, if the cache folder is writable."""
    record = {
        "costs": str(measured.costs),
        "row_ms": measured.row_ms,
        "node_ms": measured.node_ms,
        "date": when.isoformat(),
        "situation": situation.__dict__,
    }
    with suppress(OSError):  # otherwise the next load measures again
        write_atomically(path, json.dumps(record) + "\n")
