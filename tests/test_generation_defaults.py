"""``generate``, ``bench``, ``certify`` and ``tune`` decode with the defaults of the model's generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anabranch.api import load
from anabranch.bench.inprocess import bench
from anabranch.certify import certify
from anabranch.tune.fit import fit
from toy_text import ToyFolders
from verbs import Anabranch

NEW = 24
# ends texts after a few tokens that are longer without it
SOON: dict[str, Any] = {"exponential_decay_length_penalty": [4, 1.9]}
SAID = "defaults of the model's generation config: exponential_decay_length_penalty"


@pytest.fixture
def hasty(toys: ToyFolders, tmp_path: Path) -> Path:
    """A model whose generation config makes texts short."""
    folder = tmp_path / "hasty"
    shutil.copytree(toys.model, folder)
    path = folder / "generation_config.json"
    stated = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stated | SOON))
    return folder


@pytest.mark.thorough
def test_measurements_have_the_defaults_of_the_generation_config(toys: ToyFolders, hasty: Path) -> None:
    model, usual = load(str(hasty), dtype="float32"), load(str(toys.model), dtype="float32")
    text = "the river"
    prompt = list(model.tokenizer.encode(text))
    short = len(model.generate(text, max_new_tokens=NEW).token_ids)
    assert short < len(usual.generate(text, max_new_tokens=NEW).token_ids)
    options: dict[str, Any] = {"max_new_tokens": NEW}
    (certificate,) = certify(model.target, [], "prompt_lookup", [prompt], **options)
    assert (certificate.verdict, certificate.tokens) == ("equal", short)
    assert bench(model, text, ["prompt_lookup"], **options).records[0]["tokens"] == short
    assert fit(model.target, [], [prompt], **options).tried[0].prediction.tokens == short
    off: dict[str, Any] = {"call": {"exponential_decay_length_penalty": ()}}
    (without,) = certify(model.target, [], "prompt_lookup", [prompt], **options, **off)
    assert without.tokens > short, "an option of the call overrides the model's"


@pytest.mark.thorough
def test_verbs_name_the_defaults_that_they_use(anabranch: Anabranch, hasty: Path) -> None:
    where = ("--model", hasty, "--dtype", "float32", "--limit", 1, "--raw", "-n", 8)
    for verb in (("bench", "--methods", "none"), ("certify", "--drafter", "prompt_lookup"), ("tune", "--dry")):
        assert SAID in anabranch(*verb, *where).err, verb


def test_stop_strings_are_named_where_they_end_no_text(anabranch: Anabranch, hasty: Path) -> None:
    path = hasty / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stop_strings": ["river"]}))
    done = anabranch("certify", "--drafter", "none", "--model", hasty, "--limit", 1, "--raw", "-n", 8)
    assert "its stop strings end no text here" in done.err
