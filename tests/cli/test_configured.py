"""Verbs that take one frozen configuration, and the options that verbs share."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from anabranch import api
from anabranch.cli import options
from anabranch.cli.certify import CertifyConfig
from anabranch.cli.chat import ChatConfig
from anabranch.cli.configured import build, configured, parameters
from anabranch.cli.generate import GenerateConfig
from anabranch.declared import CALL
from anabranch.declared import check as check_call
from anabranch.errors import AnabranchError, InputError
from anabranch.loading import LoadConfig, check
from anabranch.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Annotated[int, typer.Option(help="set the size")] = 3
    names: Annotated[tuple[str, ...], typer.Option("--name", help="add a name; repeatable")] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    where: Annotated[Path, typer.Argument(help="the place")]
    inner: Inner = field(default=Inner(size=5))
    flag: Annotated[bool, typer.Option("--flag", help="set the flag")] = False


def called(*words: str) -> tuple[bool, Outer]:
    seen: list[tuple[bool, Outer]] = []
    app = typer.Typer()

    @app.command()
    @configured
    def verb(context: typer.Context, config: Outer) -> None:
        """Do it."""
        seen.append((context.get_parameter_source("size") is not None, config))

    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_verb_gets_one_configuration() -> None:
    assert called("here") == (True, Outer(where=Path("here"), inner=Inner(size=5)))
    _, config = called("here", "--size", "7", "--name", "a", "--name", "b", "--flag")
    assert config == Outer(where=Path("here"), inner=Inner(size=7, names=("a", "b")), flag=True)


def test_parameters_and_build_are_inverse() -> None:
    defaults = {parameter.name: parameter.default for parameter in parameters(Outer)}
    assert defaults == {"where": inspect.Parameter.empty, "size": 5, "names": None, "flag": False}
    assert build(Outer, {**defaults, "where": Path("x")}) == Outer(where=Path("x"), inner=Inner(size=5))


def test_shared_options_have_pythons_defaults() -> None:
    signature = inspect.signature(api.load).parameters
    assert signature["name"].default == LoadConfig().model
    for name in ("dtype", "device", "quantize", "revision", "threads", "lora", "kv"):
        assert signature[name].default == getattr(LoadConfig(), name), name
    assert options.params(CertifyConfig().sampling) == SamplingParams()
    assert {*options.SAMPLING} == {field.name for field in fields(SamplingParams)} - {"processors", "constraint"}


def test_options_of_a_call_come_from_their_declarations() -> None:
    offered = {parameter.name: parameter for parameter in parameters(ChatConfig)}
    for name, default in ChatConfig().call.items():
        assert offered[name].default == default
        assert CALL[name].help in str(offered[name].annotation.__metadata__[0].help)
        assert default == CALL[name].default or name == "max_new_tokens"
    assert str(offered["temperature"].annotation).startswith("typing.Annotated[float,")
    assert build(ChatConfig, {name: each.default for name, each in offered.items()}) == ChatConfig()
    assert {*GenerateConfig().call} <= {*CALL}


def test_every_declared_option_is_described_and_checked() -> None:
    described = inspect.getdoc(api.Model.generate) or ""
    assert not [name for name in CALL if name not in described]
    assert not [name for name, option in CALL.items() if option.check is None and name not in ("drafter", "log_probs")]


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match=r"rule must be 'match' or 'rejection', got 'follow'"):
        check_call({"rule": "follow"})
    with pytest.raises(InputError, match=r"--max-new-tokens must be at least 1, got 0"):
        options.check_at_least(1, repeats=2, limit=None, max_new_tokens=0)


@pytest.mark.parametrize(
    "config",
    [
        LoadConfig(dtype="int3"),
        LoadConfig(device="tpu"),
        LoadConfig(quantize="int2"),
        LoadConfig(kv="int4"),
        LoadConfig(threads=0),
    ],
)
def test_invalid_options_are_refused_before_loading(config: LoadConfig) -> None:
    with pytest.raises(AnabranchError, match=r"int3|tpu|int2|int4|got 0"):
        check(config)
