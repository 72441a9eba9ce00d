"""``anabranch serve``: a model behind OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

import typer

from anabranch.cli import options, show
from anabranch.cli.configured import configured
from anabranch.errors import CapabilityError
from anabranch.loading import LoadConfig
from anabranch.serve.settings import Settings, check, keys_of

__all__ = ["ServeConfig", "serve"]

NEEDED = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The options of ``anabranch serve``."""

    loading: LoadConfig = field(default=LoadConfig())
    drafter: options.DefaultDrafter = None
    settings: Settings = field(default=Settings())


@configured
def serve(config: ServeConfig) -> None:
    """Serve a model to every client of OpenAI's or Anthropic's interfaces, on this machine only by default.

    Prints its address once it takes requests. Requests are batched, and each gets the text that it would get alone.
    SIGTERM and Ctrl-C let requests in progress end, for up to --drain-seconds. Logs are lines of JSON on standard
    error.
    """
    check(config.settings)
    keys_of(config.settings)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise CapabilityError(
            f"the server needs packages that are not installed ({missing[0]}): pip install 'anabranch[serve]'"
        )
    from anabranch.serve.run import bound
    from anabranch.serve.run import serve as run

    with bound(config.settings) as listening:
        with show.Wait() as wait:
            model = show.load_model(config.loading, config.drafter, {}, wait)
        with model:
            show.sentences([model.target.title, f"drafter {model.spec_of_several}", *show.lesser_kernels(model)])
            run(model, config.settings, listening, lambda url: typer.echo(f"serving at {url}"))
