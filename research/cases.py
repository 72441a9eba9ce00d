"""The methods of a comparison: each with the adapter that was trained for it, and its drafters by node budget."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from anabranch.adapters.folder import CONFIG, load_adapter, read_record
from anabranch.adapters.record import method_of
from anabranch.drafting.counting import parameters
from anabranch.drafting.settings import Settings, TreeSettings
from anabranch.drafting.tables import TableSettings, find_tables
from anabranch.errors import CapabilityError, InputError
from anabranch.loading import Loaded
from anabranch.methods import Method, make_drafter, methods, parse_spec
from anabranch.methods.draft_model.entry import DraftModelSettings, draft_of
from anabranch.methods.spec import Part, Spec
from anabranch.model.load import Target
from anabranch.model.weights import build_decoder, fingerprint
from anabranch.sampling import SamplingParams
from anabranch.support.files import without_folders
from anabranch.support.jsonfiles import is_number
from anabranch.train.checkpoint import read_checkpoint, read_log

__all__ = [
    "LOAD",
    "Case",
    "adapter_cases",
    "contenders",
    "facts",
    "free_cases",
    "in_folder",
    "opened",
    "rejection_spec",
    "unique",
]

LOAD = "auto"  # the contender whose number of nodes follows the load
TUNED = "model"  # the folder inside an adapter's that has the target which training made
WEIGHTS = "adapter.safetensors"


@dataclass(frozen=True)
class Case:
    """One method of a comparison.

    name    its label
    part    the method, with settings as given
    folder  the adapter folder, or None for methods without one
    tuned   the folder of the target that was trained together with the adapter; None: the target of the comparison
    """

    name: str
    part: Part
    folder: Path | None = None
    tuned: Path | None = None

    @property
    def method(self) -> Method:
        """The entry of the registry."""
        return self.part.method


def adapter_cases(texts: Sequence[str]) -> list[Case]:
    """The cases of ``LABEL=FOLDER`` texts, and of the methods that read the same weights as one of them.

    A label may have settings, as in ``eagle-1:tree=static=FOLDER``; the case is then the only one of its folder.

    Raises InputError for a malformed text, AdapterError for a folder that is no adapter.
    """
    found = []
    for text in texts:
        settled = ":" in text.partition("=")[0]
        label, equals, place = text.rpartition("=") if settled else text.partition("=")
        if not equals or not label.strip() or not place.strip():
            raise InputError(f"an adapter must be LABEL=FOLDER, as in heads=FOLDER, got {text!r}")
        folder, label = Path(place.strip()).expanduser(), label.strip()
        record = read_record(folder)
        method, trained = method_of(record)
        tuned = _tuned(folder / TUNED, record)
        settings = label.partition(":")[2]
        found.append(Case(label, Part(method, method.settings.parse(settings, method.name)), folder, tuned))
        for reader in methods() if not settings else ():
            if reader.reads is trained:
                name = reader.name if label.replace("-", "_") == method.name else f"{reader.name} ({label})"
                found.append(Case(name, Part(reader, reader.settings()), folder, tuned))
    return found


def _tuned(model: Path, record: Mapping[str, Any]) -> Path | None:
    """The model in an adapter's folder if it is the adapter's target; a draft model stands there too."""
    return model if model.is_dir() and fingerprint(model) == record["target"]["fingerprint"] else None


def in_folder(folder: Path) -> list[str]:
    """``LABEL=FOLDER`` texts of the adapter folders inside a folder, labelled with their names.

    Raises InputError if there is none.
    """
    found = sorted(path.parent for path in folder.expanduser().glob(f"*/{CONFIG}"))
    if not found:
        raise InputError(f"there is no adapter folder in {folder}; give the folder that contains them")
    return [f"{path.name}={path}" for path in found]


def free_cases(texts: Sequence[str]) -> list[Case]:
    """The cases of specifications of methods that need no adapter, such as ``NAME:data=FOLDER``.

    Raises InputError for a combination of methods, and for a method that needs an adapter.
    """
    found = []
    for text in texts:
        spec = parse_spec(text)
        if len(spec.parts) != 1:
            raise InputError(f"a comparison is between methods, not combinations of them; got {text!r}")
        (part,) = spec.parts
        own = part.method.trained is not None or part.method.reads is not None
        if own and not isinstance(part.settings, DraftModelSettings):  # a draft model is named, or one that ships
            raise InputError(f"the method {part.method.name!r} needs an adapter; give its folder as LABEL=FOLDER")
        found.append(Case(without_folders(str(spec)), part))
    return found


def unique(cases: Sequence[Case]) -> list[Case]:
    """The cases as given. Raises InputError if two have the same label."""
    names = [case.name for case in cases]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two methods are labelled {twice[0]!r}; give each adapter a label of its own")
    return list(cases)


def opened(case: Case, target: Target) -> Loaded:
    """The target with the case's adapter. Raises AdapterError for an adapter of another target."""
    target.decoder.rider = None  # that of an earlier case
    return Loaded(target, () if case.folder is None else (load_adapter(case.folder, target),))


# -- drafters ------------------------------------------------------------------------------------------------------
def contenders(case: Case, budgets: Sequence[int]) -> dict[str, Spec]:
    """The drafters of a case by label: "N nodes" for each budget, and ``LOAD`` where the method follows the load.

    Budgets count the root. A method whose drafts have no such size has one drafter, "as given".
    """
    found, given = {}, case.part.settings
    unsized = isinstance(given, TreeSettings) and given.budget is None  # a chain, or a product tree
    for nodes in () if unsized else budgets:
        sized = _sized(case.method, nodes)
        if sized is not None:
            found[f"{nodes} nodes"] = Spec((Part(case.method, _with(sized, given)),))
    if not found:
        found["as given"] = Spec((case.part,))
    following = _with(case.method.settings.under_load(), given)
    if following.adaptive and following == replace(following, **_changed(given)):
        found[LOAD] = Spec((Part(case.method, following),))
    return found


def _sized(method: Method, nodes: int) -> Settings | None:
    """The settings of a method for drafts of this many nodes, root included; None if it has no such size."""
    tried = list(method.candidates(nodes))
    if tried:
        return tried[-1]
    # not all methods with a budget are tried by the tuner
    has_budget = any(field.name == "nodes" for field in fields(method.settings))
    return method.settings.parse(f"nodes={nodes}", method.name) if has_budget else None


def _with(settings: Settings, given: Settings) -> Settings:
    """``settings`` with the values of ``given`` that are not its defaults, except where ``settings`` has its own."""
    return replace(settings, **{**_changed(given), **_changed(settings)})


def _changed(settings: Settings) -> dict[str, Any]:
    """The values that are not defaults."""
    values = {field.name: (getattr(settings, field.name), field.default) for field in fields(settings)}
    return {name: value for name, (value, default) in values.items() if value != default}


def rejection_spec(case: Case, loaded: Loaded) -> Spec | None:
    """The first variant of the method that serves the rule *rejection* at a temperature above 0; None without one."""
    for text in case.method.variants:
        settings = _with(case.method.settings.parse(text, case.method.name), case.part.settings)
        spec = Spec((Part(case.method, settings),))
        drafter = make_drafter(spec, loaded.target.decoder, *loaded.modules)
        try:
            drafter.check(SamplingParams(temperature=1.0), "rejection")
        except CapabilityError:
            continue
        return spec
    return None


# -- what it took to train -----------------------------------------------------------------------------------------
def facts(case: Case, target: Target) -> dict[str, Any]:
    """Needs of a case besides the target: parameters, bytes, data and training time, from its adapter folder.

    extra_parameters  trained parameters besides the target's; those merged into a tuned target are not extra
    parameter_share   the same divided by the target's parameters
    bytes             of the stored adapter or tables; ``tuned_bytes`` of the tuned target's weights, if there is one
    tables            what the tables were counted from: "tokens", and for a datastore "documents"
    data_sha256       of the training examples
    init              SHA-256 of the weights that training started from, if it did not start from fresh ones
    seconds           of training; with ``seconds_from`` "log", estimated from the run's log
    """
    of_target, settings = parameters(build_decoder(target.config)), case.part.settings
    if case.folder is None and isinstance(settings, DraftModelSettings):
        extra = parameters(build_decoder(draft_of(target.decoder, settings, case.method.name).config))
        return {"extra_parameters": extra, "parameter_share": round(extra / of_target, 6)}
    if case.folder is None:
        found: dict[str, Any] = {"extra_parameters": 0, "parameter_share": 0.0, "bytes": 0}
        if isinstance(settings, TableSettings) and case.method.tables is not None:
            opened = find_tables(case.method.tables, target.decoder, settings.data)
            found |= {"bytes": sum(array.nbytes for array in opened.arrays.values()), "tables": opened.facts}
        return found
    record = read_record(case.folder)
    training, run = record["training"], case.folder / "training"
    found = {
        "extra_parameters": record["parameters"],
        "parameter_share": round(record["parameters"] / of_target, 6),
        "bytes": (case.folder / WEIGHTS).stat().st_size + (case.folder / CONFIG).stat().st_size,
        "adapter": record["sha256"],
        "dtype": record.get("dtype"),
        "config": record["config"],
        "data": training.get("data"),
        "examples": training.get("examples"),
        "answer_tokens": training.get("answer_tokens"),
        "epochs": training.get("options", {}).get("epochs"),
        "steps": training.get("steps"),
        "command": training.get("command"),
        "init": training.get("init"),
        "data_sha256": training.get("data_sha256") or (read_checkpoint(run) or {}).get("examples"),
    }
    if case.tuned is not None:
        found["tuned_bytes"] = sum(path.stat().st_size for path in case.tuned.glob("*.safetensors"))
    if is_number(training.get("seconds"), 0):
        return found | {"seconds": training["seconds"], "seconds_from": "adapter"}
    estimated = _logged_seconds(read_log(run))
    return found if estimated is None else found | {"seconds": estimated, "seconds_from": "log"}


def _logged_seconds(log: Sequence[Mapping[str, Any]]) -> float | None:
    """The seconds of a run from the estimates of the time left in its log, without pauses; None without enough of them.

    A line's estimate is the mean seconds of a step so far, times the steps left. The median over the stretches between
    lines is taken for all steps.
    """
    passed = [(0, 0.0)]
    for line in log:
        step, steps, left = int(line["step"]), int(line.get("steps", 0)), float(line.get("seconds_left", 0))
        if passed[-1][0] < step < steps and left > 0:
            passed.append((step, left / (steps - step) * step))
    if len(passed) < 2:
        return None
    stretches = [(after - before) / (last - first) for (first, before), (last, after) in pairwise(passed)]
    return round(statistics.median(stretches) * int(log[-1]["steps"]), 1)
