"""The registered methods: those of the library, and your own.

Your own method needs no change here: ``register`` it, name a file that does to ``load_plugin``, or declare an entry
point of the group ``anabranch.methods`` (docs/methods.md).
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from anabranch.drafting.drafter import Drafter, Method, Needs, Observation, Row
from anabranch.errors import FileError, InputError
from anabranch.methods import lookahead, none, plugins, prompt_lookup, spec, staged, suffix
from anabranch.methods.draft_model import entry as draft_model
from anabranch.methods.eagle import entry as eagle
from anabranch.methods.hydra import entry as hydra
from anabranch.methods.medusa import entry as medusa
from anabranch.methods.ngram import entry as ngram
from anabranch.methods.quantized_draft import entry as quantized_draft
from anabranch.methods.rest import entry as rest
from anabranch.methods.space import entry as space
from anabranch.methods.spec import AUTO, Spec
from anabranch.methods.streams import entry as streams
from anabranch.model.decoder import Decoder

__all__ = [
    "AUTO",
    "Drafter",
    "Method",
    "Needs",
    "Observation",
    "Row",
    "Spec",
    "load_plugin",
    "make_drafter",
    "methods",
    "parse_spec",
    "register",
    "resolve_spec",
]

_registry: tuple[Method, ...] = (
    none.METHOD,
    streams.METHOD,
    prompt_lookup.METHOD,
    suffix.METHOD,
    lookahead.METHOD,
    ngram.METHOD,
    rest.METHOD,
    draft_model.METHOD,
    quantized_draft.METHOD,
    medusa.METHOD,
    medusa.METHOD_2,
    hydra.METHOD,
    staged.METHOD,
    eagle.METHOD,
    space.METHOD,
)
_own = frozenset(method.name for method in _registry)


def methods() -> tuple[Method, ...]:
    """The registered methods."""
    return _registry


def register(method: Method) -> None:
    """Add your own method, or replace one that was added under the same name.

    Raises InputError if the name belongs to a method of the library, or is not valid in a specification.
    """
    global _registry
    if not method.name.isidentifier() or method.name == AUTO:
        raise InputError(f"a method's name must be an identifier other than {AUTO!r}, got {method.name!r}")
    if method.name in _own:
        raise InputError(f"the name {method.name!r} is taken by a method of the library; choose another")
    _registry = (*(known for known in _registry if known.name != method.name), method)


def load_plugin(path: str | Path) -> tuple[Method, ...]:
    """Run a Python file that registers methods; returns these.

    Raises FileError for a file that fails, with the line, or that registers nothing.
    """
    before = _registry
    plugins.run_file(Path(path))
    added = tuple(method for method in _registry if method not in before)
    if not added:
        raise FileError(f"the plugin {path} registers no method; call anabranch.register(Method(...)) in it")
    return added


def parse_spec(text: str | Spec) -> Spec:
    """Parse a drafter's specification; no model is needed. Raises InputError.

    A method that is not registered is imported if an installed package declares it.
    """
    if isinstance(text, str):
        known = {method.name for method in _registry}
        for name in spec.names(text):
            if name not in known and (point := plugins.installed().get(name)) is not None:
                register(plugins.value_of(point))
    return spec.parse(text, _registry)


def resolve_spec(text: str | Spec, *modules: nn.Module | None) -> Spec:
    """Parse a specification and resolve "auto", given the trained modules that are available.

    With modules of several methods, "auto" becomes a specification with several ``choices``, printed as "auto".
    """
    return spec.resolve(parse_spec(text), modules, _registry)


def make_drafter(text: str | Spec, target: Decoder, *modules: nn.Module | None) -> Drafter:
    """The drafter of a specification, for one target and its trained modules.

    Raises InputError for a name or setting that does not exist, CapabilityError for one that is not supported here.
    """
    with target.decoding():  # weights are merged and packed by many small operations (see ``pack_decoder``)
        return spec.build(resolve_spec(text, *modules), target, modules)
