"""Commands that take one frozen configuration, whose fields are the command-line options.

    @dataclass(frozen=True, kw_only=True)
    class Sampling:
        temperature: Annotated[float, typer.Option(help="divide the logits by this")] = 0.0

    @dataclass(frozen=True, kw_only=True)
    class GenerateConfig:
        prompt: Annotated[str, typer.Argument(help="the prompt")]
        sampling: Sampling = Sampling()

    @configured
    def generate(config: GenerateConfig) -> None: ...

A field that is itself a configuration contributes its fields, with the defaults of its default instance; a
``LoadConfig`` also --plugin. A field of the type ``Keywords`` (``chosen``), or of another such dictionary of declared
options, contributes options of a call. A field
``tuple[X, ...]`` is a repeatable option, or an argument of one or more values. Other parameters of the command, such as
a ``typer.Context``, are passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar, get_args, get_origin, is_typeddict

import typer
from typer.main import get_command

from anabranch.cli import completion
from anabranch.cli.help import HELP, Verb
from anabranch.declared import CALL, Keywords, hints_of
from anabranch.declared import Option as Declared
from anabranch.loading import LoadConfig

if TYPE_CHECKING:
    from anabranch.learning.recipe import Option, Recipe, Training

__all__ = ["PLUGIN", "Plugins", "build", "chosen", "configured", "extended", "parameters", "recipe_rows"]

C = TypeVar("C")


def configured(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command for typer: the fields of its ``config`` become keyword parameters."""
    signature = inspect.signature(verb, eval_str=True)
    kind: type[Any] = signature.parameters["config"].annotation
    others = [parameter for name, parameter in signature.parameters.items() if name != "config"]
    names = {parameter.name for parameter in others}

    def called(**values: Any) -> None:
        given = {name: value for name, value in values.items() if name not in names}
        verb(**{name: values[name] for name in names}, config=build(kind, given))

    offered = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others), *parameters(kind)]
    called.__name__, called.__doc__, called.__module__ = verb.__name__, verb.__doc__, verb.__module__
    return _signed(called, offered)


def extended(
    name: str,
    verb: Callable[[Any, dict[str, Any]], None],
    kind: type[Any],
    training: Training,
    help: str,
) -> Any:
    """A command with the options of a configuration and of a training, whose defaults are those of its first recipe.

    ``verb`` gets the configuration, and those values of the training's options that were given, by name. ``--help``
    shows the values of the recipes.
    """
    more, recipes = training.options, training.recipes

    def called(**values: Any) -> None:
        given = {name: value for name in more if (value := values.pop(name)) is not None}
        verb(build(kind, values), given)

    offered = list(parameters(kind))
    for name, option in more.items():
        first = next((shown_value(option.of(recipe, name)) for recipe in recipes.values()), "")
        default = f"  [default: {first}]" if first else ""
        values = next((option.choices(recipe, name) for recipe in recipes.values()), ())
        completed = completion.one_of(*values) if values else None
        hint: Any = Annotated[
            Optional[option.kind],  # noqa: UP045 - an annotation made here
            typer.Option(help=option.help + default, autocompletion=completed),
        ]
        offered.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    called.__doc__ = help
    single = typer.Typer(add_completion=False, **HELP)
    single.command(name, cls=Verb)(_signed(called, offered))
    made = get_command(single)
    assert isinstance(made, Verb)
    made.recipes = recipe_rows(more, recipes)
    return made


def recipe_rows(options: Mapping[str, Option], recipes: Mapping[str, Recipe]) -> list[list[str]]:
    """The values in which recipes differ, as a table: a line of their names, then one an option."""
    rows = [["", *recipes]]
    if len(recipes) > 1:
        rows.append(["--init", *(recipe.init or "none" for recipe in recipes.values())])
    for name, option in options.items():
        values = [shown_value(option.of(recipe, name)) for recipe in recipes.values()]
        rows.append([f"--{name.replace('_', '-')}", *(value or "auto" for value in values)])
    return [row for row in rows if row is rows[0] or len({*row[1:]}) > 1]


def shown_value(value: Any) -> str:
    """A recipe's value for people; empty for None, which the option's help explains."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _signed(called: Callable[..., None], offered: list[inspect.Parameter]) -> Callable[..., None]:
    """Give a function the signature that typer reads."""
    called.__signature__ = inspect.Signature(offered)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in offered}
    return called


def chosen(*names: str, **defaults: Any) -> Callable[[], Keywords]:
    """The default factory of a configuration's field for these options of a call.

    Their defaults are the declared ones unless others are given here. One whose default is a tuple is repeatable.
    """
    return lambda: {name: defaults.get(name, CALL[name].default) for name in names}  # type: ignore[return-value]


def parameters(kind: type[Any], defaults: Any = None) -> Iterator[inspect.Parameter]:
    """The options of a configuration as keyword parameters; ``defaults`` is an instance of it, or None."""
    for field, hint in _hinted(kind):
        default = _default(field, defaults)
        if is_dataclass(hint):
            yield from parameters(hint, None if default is MISSING else default)  # type: ignore[arg-type]
        elif is_typeddict(hint):
            for name, value in default.items():
                yield _parameter(name, _offered(hints_of(hint)[name], value), value)
        elif isinstance(_declared(hint), Declared):
            yield _parameter(field.name, _offered(hint, default), default)
        elif get_origin(hint) is Annotated:
            yield _parameter(field.name, hint, default)
    if kind is LoadConfig:
        yield _parameter("plugin", Annotated[tuple[Path, ...], PLUGIN], ())


def build(kind: type[C], given: dict[str, Any]) -> C:
    """Build a configuration from the flat values of its options."""
    values: dict[str, Any] = {}
    for field, hint in _hinted(kind):
        if is_dataclass(hint):
            values[field.name] = build(hint, given)  # type: ignore[arg-type]
        elif is_typeddict(hint):
            names = _default(field, None)
            values[field.name] = {name: tuple(v) if isinstance(v := given[name], list) else v for name in names}
        elif field.name in given:
            plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
            repeated = get_origin(plain) is tuple
            values[field.name] = tuple(given[field.name] or ()) if repeated else given[field.name]
    return kind(**values)


def _hinted(kind: type[Any]) -> list[tuple[Any, Any]]:
    """The fields of a configuration with their annotations."""
    hints = hints_of(kind)
    return [(field, hints[field.name]) for field in fields(kind)]


def _declared(hint: Any) -> Any:
    return get_args(hint)[1] if get_origin(hint) is Annotated else None


def _offered(hint: Any, default: Any) -> Any:
    """A declared option as typer's: of the first type that the command line can read."""
    option: Declared = _declared(hint)
    types = get_args(get_args(hint)[0]) or (get_args(hint)[0],)
    kind: Any = next((each for each in types if each in (bool, int, float, str, Path)), str)
    if isinstance(default, tuple):
        kind = tuple[kind, ...]
    elif default is None:
        kind = Optional[kind]  # noqa: UP045 - an annotation made here
    completed = completion.one_of(*option.values) if option.values else None
    more = "; repeatable" if isinstance(default, tuple) and not option.help.endswith("repeatable") else ""
    return Annotated[
        kind, typer.Option(*option.flags, help=option.help + more, metavar=option.metavar, autocompletion=completed)
    ]


def _default(field: Any, defaults: Any) -> Any:
    if defaults is not None:
        return getattr(defaults, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """A keyword parameter in typer's spelling, which has lists for ``tuple[X, ...]``."""
    plain, *extras = get_args(hint)
    if get_origin(plain) is tuple:
        plain = list[get_args(plain)[0]]  # type: ignore[misc]
        if default is not MISSING:
            default, plain = list(default) or None, Optional[plain]  # noqa: UP045 - an annotation made here
    annotation: Any = plain
    for extra in extras:
        annotation = Annotated[annotation, extra]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=annotation,
    )


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    """Register the methods of files, before other options name them."""
    for path in paths or ():
        from anabranch.methods import load_plugin

        load_plugin(path)
    return paths


PLUGIN: Any = typer.Option(
    "--plugin",
    metavar="FILE.py",
    is_eager=True,
    callback=_load_plugins,
    help="run this Python file first, which registers a drafter of your own (docs/methods.md); repeatable",
)
Plugins = Annotated[Optional[list[Path]], PLUGIN]  # noqa: UP045 - of a command without a configuration
