"""Step times in the shape of a model whose weights mean nothing, at toy size."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from anabranch.analysis.cost import MODELS
from anabranch.bench.shape_tables import pass_costs, shape_record
from anabranch.bench.shapes import SHAPES, Fixed, Shape, measure_shape
from anabranch.cli import app
from anabranch.errors import CapabilityError, DeviceError, InputError
from anabranch.methods import Row
from anabranch.methods.streams import entry as streams_method
from anabranch.model import weights
from anabranch.model.families import model_config
from anabranch.model.random_stored import random_stored_decoder
from anabranch.model.weights import random_decoder
from anabranch.native.library import library
from anabranch.sampling import SamplingParams
from small import logits_after
from toy_text import ToyFolders

TOY = {**MODELS["Llama-68m"], "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
TOY |= {"intermediate_size": 96, "vocab_size": 320}
CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels")


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "toy", TOY)


def measured(dtype: torch.dtype = torch.float32, **more: Any) -> Shape:
    usual: dict[str, Any] = {"widths": (1, 4, 20), "batches": (1, 3), "contexts": (7, 30), "rounds": 2, "nodes": 8}
    return measure_shape("toy", dtype=dtype, device=CPU, **usual | more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_kind_is_measured_at_every_batch_and_context(dtype: torch.dtype) -> None:
    shape = measured(dtype)
    kinds = ["plain", "verify 1", "verify 4", "verify 20", "streams"]
    cells = [(t.batch, t.context, t.kind) for t in shape.times]
    assert cells == [(b, c, kind) for c in (7, 30) for b in (1, 3) for kind in kinds]
    for times in shape.times:
        assert 0 < times.ms[0] <= times.ms[1] <= times.ms[2]
        assert times.steps == 2
        nodes = {"plain": 1, "streams": 8, "verify 1": 1, "verify 4": 4, "verify 20": 20}
        assert times.nodes == nodes[times.kind]
    assert shape.machine.floor_ms > 0


def test_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams_method.PUBLISHED, "toy", (3.5, 3.0))
    shape = measured(batches=(1,), contexts=(7,))
    (row,) = shape.ratios()
    plain, streams = (shape.find(1, 7, kind) for kind in ("plain", "streams"))
    assert row["plain_over_floor"] == pytest.approx(plain.ms[1] / shape.machine.floor_ms, abs=1e-3, rel=1e-2)
    low, middle, high = streams.over_plain
    assert low <= row["over_plain"] == middle <= high
    assert plain.over_plain == (1, 1, 1)
    assert row["speedup"] == pytest.approx(3.5 / middle, abs=1e-3, rel=1e-2)
    assert row["speedup_in_the_paper"] == 3.0


def test_what_does_not_fit_is_left_out_and_the_rest_goes_on() -> None:
    shape = measured(batches=(1, 2**40), contexts=(7,))
    assert {t.batch for t in shape.times} == {1}
    ((batch, context, why),) = shape.left_out
    assert (batch, context) == (2**40, 7)
    assert "needs" in why


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no shape '8b'; shapes are 135m, 7b"):
        measure_shape("8b", dtype=torch.float32, device=CPU)
    for name in ("widths", "batches", "contexts"):
        with pytest.raises(InputError, match="must be at least 1, got 0"):
            measured(**{name: (2, 0)})
    monkeypatch.setattr(weights, "free_memory", lambda device: 1000)
    with pytest.raises(DeviceError, match="use a smaller model"):
        measured()


def test_random_weights_have_the_shape_and_no_two_rows_alike() -> None:
    config = model_config(TOY)
    decoder = random_decoder(config, dtype=torch.bfloat16, device=CPU)
    assert all(p.dtype == torch.bfloat16 and not p.is_meta for p in decoder.parameters())
    assert torch.unique(decoder.embedding.weight, dim=0).shape[0] == config.vocab_size
    for name in SHAPES.values():
        assert model_config(MODELS[name]).family == "llama"


def test_a_fixed_draft_is_as_wide_as_asked_and_as_deep_as_of_use() -> None:
    rows = [Row([5], 1, SamplingParams(), max_depth=9), Row([0], 1, SamplingParams(), max_depth=2)]
    first, second = Fixed(6).draft(rows, budget=1)
    assert (first.size, second.size) == (6, 3)
    assert first.tokens.tolist() == [5, 4, 4, 4, 4, 4]
    assert second.tokens.tolist() == [0, 1, 1]


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "toy"
    grid = ("--width", "1", "--width", "8", "--context", "5", "--dtype", "float32", "--device", "cpu")
    done = CliRunner().invoke(app, ["bench", "shape", "toy", *grid, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    (result,) = json.loads((tmp_path / "toy.json").read_text())["timed"]
    assert [step["nodes"] for step in result["steps"]][:3] == [1, 1, 8]
    assert result["ratios"][0]["plain_over_floor"] > 0
    assert all(a <= b for step in result["steps"] for a, b in pairwise(step["ms"]))
    shown = CliRunner().invoke(app, ["bench", "shape", "toy", *grid])
    assert "ms per step" in shown.output
    assert f"wrote {tmp_path / 'toy.json'}" in done.stderr
    missing = CliRunner().invoke(app, ["bench", "shape"])
    assert missing.exit_code != 0
    assert "Missing argument" in missing.stderr


def test_models_are_loaded_and_measured_one_after_another(toys: ToyFolders, tmp_path: Path) -> None:
    grid = ("--width", "1", "--width", "4", "--context", "5", "--device", "cpu")
    target, out = str(toys.model), tmp_path / "two.json"
    done = CliRunner().invoke(app, ["bench", "shape", target, f"{target}@int8", *grid, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(out.read_text())["timed"]
    assert [first["weights"], second["weights"]] == ["none", "int8"]
    assert {first["model"], second["model"]} == {toys.model.name}
    assert first["parameters"] == second["parameters"] > 0
    assert [step["kind"] for step in first["steps"]] == ["plain", "verify 1", "verify 4"]
    assert json.loads(done.stdout)["timed"] == [first, second]
    done = CliRunner().invoke(app, ["bench", "shape", target, *grid, "--context", "95"])
    assert done.exit_code == 1
    assert "a context of 95 tokens and those that are timed do not fit the model's 96 positions" in str(done.exception)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
def test_random_blocks_of_a_format(kind: str) -> None:
    config = model_config(TOY | {"hidden_size": 256, "intermediate_size": 512})
    decoder = random_stored_decoder(config, kind)
    logits = logits_after(decoder, [3, 1, 4])
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


@needs_kernels
def test_a_shape_in_a_stored_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "toy", TOY | {"intermediate_size": 128})
    shape = measured(torch.bfloat16, weights="Q8_0", batches=(1,), contexts=(7,))
    assert (shape.weights, shape.random) == ("Q8_0", True)
    assert {times.kind for times in shape.times} >= {"plain", "verify 20", "streams"}


@needs_kernels
def test_formats_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"no stored format 'Q4_X'.*Q4_0, Q4_1"):
        measured(weights="Q4_X")
    with pytest.raises(CapabilityError, match="64 columns, which do not divide into blocks of Q4_K"):
        measured(weights="Q4_K")


def test_pass_costs_name_the_first_width_over_a_limit() -> None:
    shape = measured(batches=(1,), contexts=(7,))
    times = [replace(t, over_plain=(1.0, over, 2.0)) for t, over in zip(shape.times, (1, 1, 1.2, 1.7, 9), strict=True)]
    shape.times = times
    assert [shape.first_over(1, 7, limit) for limit in (1.1, 1.5, 2.0)] == [4, 20, None]
    ((model, *_, over, over_more),) = pass_costs([shape_record(shape)]).rows
    assert (model, over, over_more) == ("toy, float32, random weights", 4, 20)
