"""``anabranch serve``: a model behind OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli import options, show
from anabranch.cli.configured import configured
from anabranch.errors import CapabilityError, InputError
from anabranch.loading import LoadConfig
from anabranch.serve.presets import PRESETS, Preset, lines, preset_of
from anabranch.serve.settings import Settings, check, keys_of

__all__ = ["ServeConfig", "serve"]

NEEDED = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The options of ``anabranch serve``."""

    loading: LoadConfig = field(default=LoadConfig())
    drafter: options.DefaultDrafter = None
    lora_models: Annotated[
        tuple[str, ...],
        typer.Option(
            "--lora-model",
            metavar="NAME=FOLDER",
            help="serve the model with this LoRA as a model of this name too; repeatable",
        ),
    ] = ()
    adapter_models: Annotated[
        tuple[str, ...],
        typer.Option(
            "--adapter-model",
            metavar="NAME=FOLDER",
            help="serve the model with this adapter, and the LoRA that was trained with it or that has this name, as a "
            "model of this name too; repeatable",
        ),
    ] = ()
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"print the lines that make a client use the server: {', '.join(PRESETS)}",
            autocompletion=lambda: list(PRESETS),
        ),
    ] = None
    settings: Settings = field(default=Settings())

    @property
    def models(self) -> LoadConfig:
        """The model with its LoRAs and adapters by name. Raises InputError for one without a name."""
        return replace(
            self.loading,
            loras=_named("--lora-model", self.lora_models),
            choices=_named("--adapter-model", self.adapter_models),
        )


def _named(option: str, given: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """The names and folders of NAME=FOLDER."""
    parts = [each.partition("=") for each in given]
    if wrong := [each for each, (name, _, folder) in zip(given, parts, strict=True) if not (name and folder)]:
        raise InputError(f"{option} must be NAME=FOLDER, got {wrong[0]!r}")
    return tuple((name, Path(folder)) for name, _, folder in parts)


@configured
def serve(config: ServeConfig) -> None:
    """Serve a model to every client of OpenAI's or Anthropic's interfaces, on this machine only by default.

    Prints its address once it takes requests. Requests are batched, and each gets the text that it would get alone.
    SIGTERM and Ctrl-C let requests in progress end, for up to --drain-seconds. Logs are lines of JSON on standard
    error.
    """
    check(config.settings)
    loading = config.models
    keyed = bool(keys_of(config.settings))
    preset = None if config.preset is None else preset_of(config.preset)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise CapabilityError(
            f"the server needs packages that are not installed ({missing[0]}): pip install 'anabranch[serve]'"
        )
    from anabranch.serve.run import bound
    from anabranch.serve.run import serve as run

    with bound(config.settings) as listening:
        with show.Wait() as wait:
            model = show.load_model(loading, config.drafter, {}, wait)
        with model:
            show.sentences([model.target.title, f"drafter {model.spec_of_several}", *show.lesser_kernels(model)])
            run(model, config.settings, listening, partial(_ready, preset, keyed))


def _ready(preset: Preset | None, keyed: bool, url: str, name: str) -> None:
    """Say where the server is, and what makes a client use it. Keys stay secret: their place has ``KEY``."""
    typer.echo(f"serving at {url}")
    if preset is not None:
        where = f" ({preset.place})" if preset.place else ""
        typer.echo(f"\n{preset.title}{where}:\n\n{lines(preset, url, name, key='KEY' if keyed else None)}")
