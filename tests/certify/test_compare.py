"""Certificates of toy targets: equal in float32 whatever drafts, greedy and sampled, one row and several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from anabranch.certify import Certificate, certify
from anabranch.drafting.tables import Tokenizer, build_tables
from anabranch.drafting.trained import TrainedModule
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import Method, methods, parse_spec
from anabranch.methods.draft_model.module import DraftConfig
from anabranch.model.load import Target, load_target
from anabranch.model.text import fingerprint
from anabranch.sampling import SamplingParams
from small import RICH, as_target, prompt, randomise, small, small_adapter
from toy_text import VOCABULARY, ToyFolders

PROMPTS = [prompt(5, 1), prompt(9, 2)]
RAGGED = [[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4], *(prompt(n, n) for n in (9, 1, 14, 4, 7))]
# of trained modules; the default ones of other methods fit the toy
CONFIGS = {"streams": RICH, "draft_model": DraftConfig(16, 1, 2, 32)}
# a quantised copy is of bf16 weights on the native kernels: tests/native/test_quantized_draft.py
NAMES = [entry.name for entry in methods() if entry.name != "quantized_draft"]


@pytest.mark.parametrize("spec", ["auto", "none", "prompt_lookup", "streams:nodes=12", "streams:nodes=8+prompt_lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(spec: str, temperature: float) -> None:
    target = as_target(small())
    heard: list[Certificate] = []
    found = certify(
        target,
        [small_adapter(target.decoder)],
        parse_spec(spec),
        PROMPTS,
        max_new_tokens=20,
        sampling=SamplingParams(temperature=temperature, seed=3),
        report=heard.append,
    )
    assert [one.verdict for one in found] == ["equal", "equal"]
    assert heard == found


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, toys: ToyFolders) -> Target:
    return load_target(str(toys.model), dtype="float32")


def with_all_it_needs(entry: Method, target: Target, folder: Path) -> tuple[str, list[TrainedModule]]:
    """A specification of a method and its modules: random weights, tables of random text, the target as draft model."""
    spec, modules = entry.name, []
    if entry.trained is not None:
        config = CONFIGS.get(entry.name) or entry.trained.config()
        modules = [entry.trained.make(target.config, config, None)]
        randomise(modules[0], seed=2, scale=0.1)
        modules[0].eval().requires_grad_(False)
    elif "model" in entry.settings.__dataclass_fields__:
        spec += f":model={target.path}"
    if entry.tables is not None:
        texts = (np.array(each * 5, np.int64) for each in RAGGED)
        tokenizer = Tokenizer("toy", fingerprint(target.tokenizer), VOCABULARY)
        build_tables(entry.tables, entry.name, texts, folder, tokenizer=tokenizer, options={})
        spec += f":data={folder}"
    return spec, modules


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.thorough), 4])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.thorough)])
def test_every_method_is_certified_alone_and_in_a_ragged_batch(
    name: str, rows: int, temperature: float, toy: Target, tmp_path: Path
) -> None:
    entry = next(each for each in methods() if each.name == name)
    spec, modules = with_all_it_needs(entry, toy, tmp_path / "tables")
    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=5)
    found = certify(toy, modules, spec, RAGGED, max_new_tokens=12, sampling=sampling, rows=rows)
    assert [each.verdict for each in found] == ["equal"] * len(RAGGED)


def test_what_cannot_be_certified_is_refused_first() -> None:
    target = as_target(small())
    with pytest.raises(InputError, match="at least one prompt"):
        certify(target, [], "none", [], max_new_tokens=4)
    with pytest.raises(InputError, match="rows must be at least 1, got 0"):
        certify(target, [], "none", PROMPTS, max_new_tokens=4, rows=0)
    with pytest.raises(CapabilityError, match="needs an adapter"):
        certify(target, [], "streams", PROMPTS, max_new_tokens=4)
