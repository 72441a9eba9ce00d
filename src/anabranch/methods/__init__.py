"""The methods, one file each, behind one seam; ``make_drafter`` builds one from its name and settings.

none
prompt_lookup:tokens=10,ngram=3
streams:tree=32,prune=16
streams:tree=auto,nodes=32         at every step as many nodes as pay for themselves, at most 32
streams+prompt_lookup              their trees merged under one node budget
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anabranch.costs import StepCosts, usual_costs
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.base import Context, Drafter, Observation
from anabranch.methods.combined import CombinedDrafter
from anabranch.methods.none import NoDrafter
from anabranch.methods.prompt_lookup import PromptLookupDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import DraftOptions
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.model.decoder import Decoder

__all__ = [
    "AUTO",
    "DRAFTERS",
    "Context",
    "Drafter",
    "Observation",
    "StepCosts",
    "check_spec",
    "make_drafter",
    "with_costs",
]

AUTO = "auto"  # what is best for this target on this machine: ``profiles.resolve`` says which drafter that is
DRAFTERS = ("none", "prompt_lookup", "streams")
PLANNED = ("draft_model", "ngram", "staged", "lookahead", "rest", "medusa", "medusa2", "hydra", "eagle", "space")

Reader = Callable[[str], Any]


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


# the settings a name takes, and how each is read
_SETTINGS: dict[str, dict[str, Reader]] = {
    "none": {},
    "prompt_lookup": {"tokens": int, "ngram": int},
    "streams": {
        "tree": str,
        "nodes": int,
        "costs": StepCosts.parse,
        "k": int,
        "depth": int,
        "frontier": int,
        "threshold": float,
        "shortlist": int,
        "condition": _flag,
        "prune": int,
        "placement": str,
    },
}


def make_drafter(spec: str, target: Decoder, adapter: StreamAdapter | None = None) -> Drafter:
    """The drafter that ``spec`` names, for one target.

    Raises InputError for a name or setting that does not exist, CapabilityError for one that cannot be had here.
    """
    parts = _parts(spec)
    costs = _costs(parts, target)
    drafters = [_build(name, settings, target, adapter) for name, settings in parts]
    if len(drafters) == 1 and costs is None:
        return drafters[0]
    nodes = next((d.tree.options.nodes for d in drafters if isinstance(d, StreamDrafter)), 32)
    return CombinedDrafter(drafters, nodes=nodes, costs=costs)


def with_costs(spec: str, costs: StepCosts) -> str:
    """``spec`` with the costs of steps by width, where it fits its trees to them and does not name others."""
    parts = _parts(spec)
    if not any(_is_auto(settings) and "costs" not in settings for _, settings in parts):
        return spec
    return "+".join(f"{part},costs={costs}" if part.strip().startswith("streams") else part for part in spec.split("+"))


def check_spec(spec: str) -> None:
    """Raise what ``make_drafter`` would raise for the words of ``spec`` alone, before any model is loaded.

    "auto" is fine: it becomes a drafter once the target is there.
    """
    if spec != AUTO:
        _parts(spec)


def _parts(spec: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(spec, str):
        raise InputError(f"a drafter is named by a string such as 'streams' or 'prompt_lookup', not {spec!r}")
    parts = [_parse(part) for part in spec.split("+")]
    if len({name for name, _ in parts}) < len(parts):
        raise InputError(f"the drafter {spec!r} names a method twice; name each once")
    if len(parts) > 1 and any(name == "none" for name, _ in parts):
        raise InputError("the drafter 'none' proposes nothing, so it cannot be combined with others")
    return parts


def _is_auto(settings: dict[str, Any]) -> bool:
    return settings.get("tree") == "auto"


def _costs(parts: list[tuple[str, dict[str, Any]]], target: Decoder) -> StepCosts | None:
    """Those that ``tree=auto`` fits trees to; None where trees are not fitted."""
    for _, settings in parts:
        if _is_auto(settings):
            return settings.get("costs") or usual_costs(target)
    return None


def _parse(part: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = part.partition(":")
    name = name.strip()
    if name in PLANNED:
        raise CapabilityError(f"the drafter {name!r} is not in this version; use one of {', '.join(DRAFTERS)}")
    if name not in _SETTINGS:
        raise InputError(f"there is no drafter {name!r}; drafters are {', '.join(DRAFTERS)}, combined with '+'")
    known = _SETTINGS[name]
    settings: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in rest.split(","))):
        key, equals, value = item.partition("=")
        if key not in known or not equals:
            allowed = ", ".join(known) or "none"
            raise InputError(f"the drafter {name!r} has no setting {item!r}; settings are {allowed}, as name=value")
        if key == "tree" and value.isdigit():
            key = "nodes"  # streams:tree=32 is short for tree=best,nodes=32
        if key in settings:
            raise InputError(f"the drafter {name!r} has the setting {key!r} twice; give it once")
        try:
            settings[key] = known[key](value)
        except InputError:
            raise
        except ValueError as error:
            wanted = {_flag: "yes or no", float: "a number"}.get(known[key], "a whole number")
            raise InputError(f"the setting {key!r} of the drafter {name!r} takes {wanted}, not {value!r}") from error
    if "costs" in settings and not _is_auto(settings):
        raise InputError("costs are what tree=auto fits trees to; give both, or leave costs out")
    return name, settings


def _build(name: str, settings: dict[str, Any], target: Decoder, adapter: StreamAdapter | None) -> Drafter:
    if name == "none":
        return NoDrafter()
    if name == "prompt_lookup":
        return PromptLookupDrafter(**settings)
    if adapter is None:
        raise CapabilityError(
            "the drafter 'streams' needs an adapter that was trained for this target, and none is at hand; give one "
            "with adapter=FOLDER, train one with 'anabranch train streams', or use drafter='prompt_lookup'"
        )
    own = {key: settings.pop(key) for key in ("prune", "placement") if key in settings}
    if settings.get("tree") == "product":
        settings.setdefault("k", 3)
    if _is_auto(settings):
        settings = {key: value for key, value in settings.items() if key != "costs"} | {"tree": "best"}
    return StreamDrafter(target, adapter, DraftOptions(**settings), **own)
