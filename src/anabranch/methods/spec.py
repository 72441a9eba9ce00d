"""The specification of a drafter: parsed once and printed back to the same text.

none
prompt_lookup:tokens=10,ngram=3
streams:tree=32,prune=16
streams:tree=auto                  the number of drafted and verified nodes follows the load and may be zero
streams+prompt_lookup              their trees, merged under one node budget
streams+quantized_draft            one drafter of both (``Method.pairs``): a quantised copy drafts, and streams go on
auto                               each method whose trained module is available, merged with those that need none, or
                                   the latter alone; several are choices, of which one is chosen for each row
rest:data="/a+b,c"                 paths with punctuation (``quoting``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from anabranch.drafting.combined import ChoiceDrafter, CombinedDrafter
from anabranch.drafting.drafter import Drafter, Method
from anabranch.drafting.settings import Settings, pieces
from anabranch.errors import CapabilityError, InputError
from anabranch.model.decoder import Decoder
from anabranch.support.nearest import hint

__all__ = ["AUTO", "Part", "Spec", "build", "names", "parse", "resolve"]

AUTO = "auto"
NODES = 32  # budget of a merged tree, if no part has a preference


@dataclass(frozen=True)
class Part:
    """One method with its settings."""

    method: Method
    settings: Settings

    def __str__(self) -> str:
        """The text of this part."""
        settings = str(self.settings)
        return f"{self.method.name}:{settings}" if settings else self.method.name


@dataclass(frozen=True)
class Spec:
    """One or several methods merged, or several choices; an empty one stands for "auto", which ``resolve`` replaces."""

    parts: tuple[Part, ...] = ()
    choices: tuple[Spec, ...] = ()

    def __str__(self) -> str:
        """The text that ``parse`` reads; that of several choices is "auto"."""
        return "+".join(map(str, self.parts)) or AUTO

    @property
    def auto(self) -> bool:
        """Return whether this is "auto" and still has to be resolved."""
        return not self.parts and not self.choices

    @property
    def units(self) -> tuple[Spec, ...]:
        """Its drafters: parts that make one drafter together, and the other parts one by one."""
        units: list[Spec] = []
        pairs = _pairs(self.parts)
        for part in self.parts:
            if part not in pairs.values():
                units.append(Spec((part, pairs[part]) if part in pairs else (part,)))
        return tuple(units)

    @property
    def plain(self) -> bool:
        """Return whether this is plain decoding."""
        return len(self.parts) == 1 and not self.parts[0].method.combines and not fields(self.parts[0].settings)


def parse(text: str | Spec, registry: Sequence[Method]) -> Spec:
    """Parse a specification. Raises InputError for a name or a setting that does not exist."""
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise InputError(f"a drafter must be a string such as 'streams' or 'prompt_lookup', got {text!r}")
    if text.strip() == AUTO:
        return Spec()
    parts = tuple(_part(part, registry) for part in _parts(text, registry))
    if len({part.method.name for part in parts}) < len(parts):
        raise InputError(f"the drafter {text!r} names a method twice; name each once")
    if len(parts) > 1 and (separate := [part.method.name for part in parts if not part.method.combines]):
        raise InputError(f"the drafter {separate[0]!r} cannot be combined with others; use it by itself")
    return Spec(parts)


def names(text: str) -> list[str]:
    """The words at the places of methods' names."""
    return [part.partition(":")[0].strip() for part in pieces(text, "+")]


def _parts(text: str, registry: Sequence[Method]) -> list[str]:
    """The parts of a specification; a path goes on at a plus sign that no method's name follows."""

    def continues(before: str, after: str) -> bool:
        method, settings = _named(before, registry)
        return method is not None and method.settings.ends_in_path(settings) and _named(after, registry)[0] is None

    return pieces(text, "+", continues)


def _named(text: str, registry: Sequence[Method]) -> tuple[Method | None, str]:
    """The method that a part names, and the text of its settings."""
    name, _, rest = text.partition(":")
    return next((method for method in registry if method.name == name.strip()), None), rest


def _part(text: str, registry: Sequence[Method]) -> Part:
    method, settings = _named(text, registry)
    if method is None:
        name = text.partition(":")[0].strip()
        if name == AUTO:
            raise InputError(f"the drafter {AUTO!r} takes no settings and cannot be combined; use it by itself")
        known = [method.name for method in registry]
        raise InputError(
            f"there is no drafter {name!r}{hint(name, (*known, AUTO))}; drafters are {', '.join(known)}, combined with "
            f"'+', and {AUTO}"
        )
    return Part(method, method.settings.parse(settings, method.name))


def _pairs(parts: Sequence[Part]) -> dict[Part, Part]:
    """The parts that go on after another one (``Method.pairs``), with that one."""
    return {
        part: first for first in parts for part in parts if part is not first and part.method.name in first.method.pairs
    }


def module_of(method: Method, modules: Sequence[nn.Module | None]) -> nn.Module | None:
    """The trained module of a method among several, or None."""
    trained = method.trained or method.reads
    return None if trained is None else next((module for module in modules if isinstance(module, trained.module)), None)


def resolve(spec: Spec, modules: Sequence[nn.Module | None], registry: Sequence[Method]) -> Spec:
    """Resolve "auto", given the trained modules; other specifications are returned unchanged."""
    if not spec.auto:
        return spec
    free = [method for method in registry if method.default and method.trained is None]
    learned: dict[int, Method] = {}  # by module: of several methods that draft with the same one, the first
    for method in registry:
        if method.trained is not None and (module := module_of(method, modules)) is not None:
            learned.setdefault(id(module), method)
    choices = tuple(_in_auto((method, *free) if method.combines else (method,)) for method in learned.values())
    return Spec(choices=choices) if len(choices) > 1 else choices[0] if choices else _in_auto(free)


def _in_auto(methods: Sequence[Method]) -> Spec:
    return Spec(tuple(Part(method, method.settings.in_auto()) for method in methods))


def build(spec: Spec, target: Decoder, modules: Sequence[nn.Module | None]) -> Drafter:
    """Build the drafter of a resolved specification. Raises CapabilityError for one that is not supported here.

    Choices share the drafters of parts without a module: what those remember of other rows serves all choices.
    """
    assert not spec.auto, "auto is resolved first"
    shared: dict[Part, Drafter] = {}
    if not spec.choices:
        return _merged(spec, target, modules, shared)
    choice = ChoiceDrafter([_merged(each, target, modules, shared) for each in spec.choices])
    choice.spec = str(spec)
    return choice


def _merged(spec: Spec, target: Decoder, modules: Sequence[nn.Module | None], shared: dict[Part, Drafter]) -> Drafter:
    """The drafter of all parts; ``shared`` has the drafters of parts without a module, by part."""
    drafters = [_single(unit, target, modules, shared) for unit in spec.units]
    if len(drafters) == 1:
        made = drafters[0]
    else:
        budgets = [part.settings.budget for part in spec.parts]
        nodes = next((budget for budget in budgets if budget is not None), NODES)
        made = CombinedDrafter(drafters, nodes=nodes, adaptive=any(drafter.adaptive for drafter in drafters))
    made.spec = str(spec)
    return made


def _single(unit: Spec, target: Decoder, modules: Sequence[nn.Module | None], shared: dict[Part, Drafter]) -> Drafter:
    """The drafter of a part, or of two that are paired."""
    part, *before = unit.parts
    module = module_of(part.method, modules)
    for each in unit.parts if target.encoder is not None else ():
        if not each.method.with_source:
            raise CapabilityError(
                f"the drafter {each.method.name!r} does not draft for encoder-decoder models; use streams, "
                "draft_model, prompt_lookup, suffix, ngram or lookahead"
            )
    if before:
        build_pair = before[0].method.pairs[part.method.name]
        return build_pair(target, before[0].settings, part.settings, module)
    drafter = shared.get(part) or part.method.build(target, part.settings, module)
    if module is None:
        shared[part] = drafter
    return drafter
