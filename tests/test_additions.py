"""Seeds and samples, top log probabilities, scores of texts, and results as JSON."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from anabranch import api
from anabranch.errors import CapabilityError, InputError
from toy_text import ToyFolders, save_toys

WARM: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ToyFolders:
    return save_toys(tmp_path_factory.mktemp("additions"))


@pytest.fixture(scope="module")
def model(folders: ToyFolders) -> api.Model:
    return api.load(folders.model, adapter=folders.adapter, dtype="float32")


def test_prompts_have_seeds_of_their_own(model: api.Model) -> None:
    texts = [model.generate("the", seed=seed, **WARM).token_ids for seed in (3, 4, 5)]
    assert [found.token_ids for found in model.generate(["the"] * 3, seed=[3, 4, 5], **WARM)] == texts
    samples: Any = model.generate("the", seed=3, n=3, **WARM)
    assert [found.token_ids for found in samples] == texts
    several: Any = model.generate(["the", "a"], seed=[4, 9], n=2, **WARM)
    assert [found.token_ids for found in several[0]] == texts[1:]
    assert several[1][1].token_ids == model.generate("a", seed=10, **WARM).token_ids
    chosen: Any = asyncio.run(model.agenerate("the", seed=3, n=2, **WARM))
    assert [found.token_ids for found in chosen] == texts[:2]


def test_combinations_that_mean_nothing_are_refused(model: api.Model) -> None:
    for options, message in (
        ({"n": 2}, "n=2 samples are all the same at temperature 0"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"seed": [1, 2], **WARM}, "seed must be a number or a list of one for each of 1 prompts"),
        ({"seed": ["x"], **WARM}, "seed must be an integer, got 'x'"),
        ({"top_log_probs": 264}, "top_log_probs must be at most 263"),
        ({"top_log_probs": -1}, "top_log_probs must be a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            model.generate("the", **options)
        assert message.split(",")[0] in model.supports(**options).reason
    with pytest.raises(InputError, match="stream decodes one sample at a time, got n=2"):
        model.stream("the", n=2, **WARM)
    assert not model.supports(stream=True, n=2, temperature=1.0)


def test_top_log_probs(model: api.Model, folders: ToyFolders) -> None:
    found = model.generate("the thing", max_new_tokens=9, top_log_probs=3, log_probs=True)
    assert found.token_ids == model.generate("the thing", max_new_tokens=9).token_ids
    scores = LlamaForCausalLM.from_pretrained(folders.model).eval()(torch.tensor([found.prompt_ids + found.token_ids]))
    logs = scores.logits[0, len(found.prompt_ids) - 1 : -1].log_softmax(-1)
    for place, (top, token) in enumerate(zip(found.top_log_probs, found.token_ids, strict=True)):
        assert next(iter(top)) == token, "greedy: the most probable one first"
        assert list(top) == logs[place].topk(3).indices.tolist()
        assert list(top.values()) == pytest.approx(logs[place].topk(3).values.tolist(), abs=1e-4)
        assert top[token] == pytest.approx(found.log_probs[place])
    chunks = list(model.stream("the thing", max_new_tokens=9, top_log_probs=3))
    assert [list(top) for chunk in chunks for top in chunk.top_log_probs or ()] == [*map(list, found.top_log_probs)]


def test_scores_are_those_of_transformers(
    model: api.Model, folders: ToyFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = LlamaForCausalLM.from_pretrained(folders.model).eval()
    ids = list(range(5, 25))
    logs = oracle(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
    expected = [float(logs[i, token]) for i, token in enumerate(ids[1:])]
    monkeypatch.setattr("anabranch.decoding.scoring.CHUNK", 7)
    found = model.score(ids)
    assert found.token_ids == ids
    assert found.log_probs == pytest.approx(expected, abs=1e-4)
    assert found.total == pytest.approx(sum(expected), abs=1e-3)
    loss = float(oracle(torch.tensor([ids]), labels=torch.tensor([ids])).loss.detach())
    assert model.perplexity(ids) == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    one, two = model.score([ids, "the thing"])
    assert one == found
    assert two == model.score("the thing") == asyncio.run(model.ascore("the thing"))
    assert "perplexity=" in repr(two)
    said = model.generate(ids, max_new_tokens=6, log_probs=True)
    assert model.score(ids + said.token_ids).log_probs[-6:] == pytest.approx(said.log_probs, abs=1e-4)
    assert model.score(ids[:1]).log_probs == []
    with pytest.raises(InputError, match="the text has 97 tokens, but the model's limit is 96; split it"):
        model.score([5] * 97)
    with pytest.raises(InputError, match="the text has the token id 263"):
        model.score([5, 263])


def test_results_are_json_and_short(model: api.Model) -> None:
    found = model.generate("the thing", max_new_tokens=20, top_log_probs=2, log_probs=True)
    record = json.loads(json.dumps(asdict(found)))
    assert record["token_ids"] == found.token_ids
    assert record["stats"]["accepted"] == {str(n): count for n, count in found.stats.accepted.items()}
    assert record["stats"]["calls"]["target 3 3"] == found.stats.steps
    assert copy.deepcopy(found) == found == pickle.loads(pickle.dumps(found))
    assert len(repr(found)) < 200
    assert repr(found).startswith("Generation('")
    assert repr(found.stats).startswith("Stats(20 tokens, ")
    for taken in (pickle.dumps, copy.deepcopy):
        with pytest.raises(CapabilityError, match="a model cannot be pickled or copied; call"):
            taken(model)
