"""``load`` and ``Model``: what goes in and what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anabranch
from anabranch.api import Model
from anabranch.errors import CapabilityError, FileError, InputError
from anabranch.methods import make_drafter
from toy_text import ToyFolders, toy_model


@pytest.fixture(scope="module")
def model() -> Model:
    return toy_model()


def test_one_prompt_gives_one_result_and_a_list_a_list(model: Model) -> None:
    text = model.generate("the thing", max_new_tokens=6)
    ids = model.generate(model.tokenizer.encode("the thing"), max_new_tokens=6)
    assert isinstance(text, anabranch.Generation)
    assert text.token_ids == ids.token_ids
    assert text.prompt_ids == ids.prompt_ids == model.tokenizer.encode("the thing")
    assert [x.token_ids for x in model.generate(["the thing"], max_new_tokens=6)] == [text.token_ids]
    assert model.generate([ids.prompt_ids, [5]], max_new_tokens=6)[0].token_ids == text.token_ids
    assert model.generate([np.int64(i) for i in ids.prompt_ids], max_new_tokens=np.int64(6)).token_ids == text.token_ids


def test_a_stream_adds_up_to_the_result(model: Model) -> None:
    chunks = list(model.stream("the thing", max_new_tokens=20, log_probs=True))
    result = model.generate("the thing", max_new_tokens=20, log_probs=True)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert [value for chunk in chunks for value in chunk.log_probs or ()] == pytest.approx(result.log_probs)
    assert len(chunks) == result.stats.steps
    assert chunks[0].step.tree.size >= 1
    assert chunks[-1].result is not None
    assert chunks[-1].result.token_ids == result.token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"prompt": prompt}, "prompt")
            for prompt in ("", [], ["the", ""], [[5], []], 5, None, b"the", [5, "the"], [True], [[5, "a"]], {})
        ),
        ({"prompt": "a\ud800b"}, r"unpaired surrogate, '\\ud800', at index 1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"rows": 0}, "rows"),
        ({"rule": "guess"}, "match"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop takes strings"),
        ({"stop": [5]}, "stop takes strings"),
        ({"processors": len}, "processors must be a list of functions"),
        ({"processors": [3]}, "processors must be a list of functions"),
        ({"processors": [lambda tokens, logits: None]}, "must return a tensor of logits, got NoneType"),
        ({"drafter": ""}, "there is no drafter"),
        ({"drafter": "speculate"}, "none, streams, prompt_lookup"),
        ({"drafter": "streams:width=3"}, "settings are tree, nodes"),
        ({"drafter": "streams:k"}, "name=value"),
        ({"drafter": "streams:k=many"}, "a whole number"),
        ({"drafter": "streams:k=0"}, "at least 1"),
        ({"drafter": "streams:depth=9"}, "only 3 streams"),
        ({"drafter": "streams:nodes=1"}, "at least 2"),
        ({"drafter": "streams:tree=oak"}, "best, product, chain, auto"),
        ({"drafter": "streams:condition=perhaps"}, "yes or no"),
        ({"drafter": "streams:placement=sit"}, "auto, ride or trail"),
        ({"drafter": "streams:prune=1"}, "prune"),
        ({"drafter": "streams:k=2,k=3"}, "twice"),
        ({"drafter": "none:k=2"}, "settings are none"),
        ({"drafter": "prompt_lookup:tokens=0"}, "at least 1"),
        ({"drafter": "streams+streams"}, "twice"),
        ({"drafter": "none+streams"}, "cannot be combined"),
        ({"drafter": "streams+"}, "there is no drafter"),
    ],
)
def test_calls_that_are_refused(model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        model.generate(**{"prompt": "the", **options})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([10**6], "vocabulary"), ([-1], "vocabulary"), ([3] * 96, "limit is 96"), (["a", "b"], "one prompt at a time")],
)
def test_a_stream_is_refused_before_its_first_chunk(model: Model, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        model.stream(prompt)
    assert not model._scheduler.busy


def test_settings_reach_the_drafter(model: Model) -> None:
    adapter = model.adapters[0].module

    def build(spec: str) -> Any:
        return make_drafter(spec, model.target.decoder, adapter)

    best = build("streams:tree=20,prune=8,k=3,depth=2,frontier=5,condition=no,placement=ride")
    options = best.tree.settings
    assert (options.tree, options.nodes, options.k, options.depth) == ("best", 20, 3, 2)
    assert (options.frontier, options.condition) == (5, False)
    assert (best.prune, best.max_nodes) == (8, 20)
    assert build("streams:tree=chain").max_nodes == 4
    assert build("prompt_lookup:tokens=4,ngram=2").max_nodes == 5
    assert build("streams:placement=ride").needs.rider is not None
    assert build("streams:placement=trail").needs.rider is None
    both = build("streams:nodes=12 + prompt_lookup:tokens=4")
    assert (both.name, both.max_nodes) == ("streams+prompt_lookup", 12)
    assert build("none").max_nodes == 1


def test_a_long_prompt_is_refused_in_our_words_alone(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError, match="the model's limit is"):
        model.generate("the thing " * 400)
    assert not caplog.records


def test_load_a_folder_with_an_adapter(toys: ToyFolders) -> None:
    model = anabranch.load(toys.model, adapter=str(toys.adapter), dtype="float32", device="cpu")
    assert model.tokenizer.decode(model.tokenizer.encode("the thing")) == "the thing"
    streams = model.generate("the thing", max_new_tokens=12)
    assert streams.token_ids == model.generate("the thing", max_new_tokens=12, drafter="none").token_ids
    assert streams.stats.draft_nodes > 0
    narrow = anabranch.load(toys.model, adapter=toys.adapter, dtype=torch.bfloat16)
    assert len(narrow.generate("the", max_new_tokens=6, ignore_eos=True).token_ids) == 6


def test_without_an_adapter_nothing_is_silently_plain(toys: ToyFolders) -> None:
    with pytest.raises(CapabilityError, match=r"adapter=FOLDER.*anabranch train streams.*prompt_lookup"):
        anabranch.load(str(toys.model), drafter="streams")
    model = anabranch.load(str(toys.model), dtype="float32")
    assert model.drafter.startswith("prompt_lookup"), "auto drafts with what there is"
    with pytest.raises(CapabilityError, match="adapter"):
        model.generate("the", drafter="streams+prompt_lookup")


def test_names_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no drafter"):
        anabranch.load(str(tmp_path / "missing"), drafter="telepathy")
    with pytest.raises(FileError, match="there is no folder"):
        anabranch.load(str(tmp_path / "missing"))
    with pytest.raises(InputError, match="named by a string"):
        anabranch.load(7)
