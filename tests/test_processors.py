"""Options that change scores by the tokens so far equal transformers' logits processors, drafts or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from anabranch import api
from anabranch.decoding.generation import Generation
from anabranch.errors import AnabranchWarning, InputError, ModelError
from anabranch.model import generation_config
from anabranch.processors import first_penalty, score_processors
from anabranch.sampling import SamplingParams, process_logits
from toy_text import VOCABULARY, ToyFolders, byte_tokenizer, save_toys, toy_model

END = VOCABULARY - 1
PROMPT = [5, 6, 7, 5, 6, 9, 30, 31, 5, 6]
CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "ngram": {"no_repeat_ngram_size": 2},
    "unigram": {"no_repeat_ngram_size": 1},
    "bias": {"sequence_bias": [[[5], 3.0], [[6, 7], -4.0], [[5, 6, 7], 2.5], [[7], 0.1]]},
    "bias_penalty": {"repetition_penalty": 1.7, "sequence_bias": [[[5], 3.0], [[6, 7], -4.0]]},
    "bad_words": {"bad_words_ids": [[5], [6, 7], [END], [40, 41, 42]]},
    "suppress": {"suppress_tokens": [5, 40, 41]},
    "begin_suppress": {"begin_suppress_tokens": [5, 40, END]},
    "min_length": {"min_length": 17},
    "min_new_tokens": {"min_new_tokens": 6, "min_length": 3},
    "forced_bos": {"forced_bos_token_id": 9, "begin_suppress_tokens": [9]},
    "forced_eos": {"forced_eos_token_id": [END, 12]},
    "decay": {"exponential_decay_length_penalty": [3, 1.5]},
    "encoder": {"encoder_repetition_penalty": 1.8, "encoder_no_repeat_ngram_size": 2},
    "invalid": {"remove_invalid_values": True, "suppress_tokens": [4]},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "encoder_repetition_penalty": 1.1,
        "bad_words_ids": [[8]],
        "min_length": 14,
        "exponential_decay_length_penalty": [8, 1.1],
        "suppress_tokens": [60],
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ToyFolders:
    return save_toys(tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def oracle(folders: ToyFolders) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folders.model).eval()


@pytest.fixture(scope="module")
def model(folders: ToyFolders) -> api.Model:
    return api.load(folders.model, adapter=folders.adapter, dtype="float32")


def theirs(oracle: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    given = torch.tensor([prompt])
    mask = torch.ones_like(given)
    said = oracle.generate(given, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
    return list(said[0, len(prompt) :].tolist())


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_transformers(oracle: Any, name: str) -> None:
    """The same random logits after the same texts, of every length."""
    options, generator = CASES[name], torch.Generator().manual_seed(3)
    config = GenerationConfig(**options, eos_token_id=[END, 11], max_length=20)
    config._eos_token_tensor = torch.tensor([END, 11])
    for prompt in (PROMPT, PROMPT[:1]):
        if "min_new_tokens" in options:
            config.min_length = options["min_new_tokens"] + len(prompt)
        length = len(prompt)
        expected = oracle._get_logits_processor(config, length, torch.tensor([prompt]), device="cpu", model_kwargs={})
        own = score_processors(options, prompt, {END, 11}, 20, VOCABULARY)
        params = SamplingParams(repetition_penalty=first_penalty(options), processors=own)
        text = list(prompt)
        while len(text) < 20:
            logits = torch.randn(1, VOCABULARY, generator=generator) * 3
            if name == "invalid":
                logits[0, 1:4] = torch.tensor([math.inf, -math.inf, math.nan])
            want = expected(torch.tensor([text]), logits.clone())
            have = process_logits(logits, params, [text])
            assert torch.equal(want, have), (len(text), (want - have).abs().max())
            text.append(int(torch.randint(5, 9, (), generator=generator)))


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(oracle: Any, model: api.Model, name: str) -> None:
    for drafter in ("none", "prompt_lookup", "streams"):
        found = model.generate(PROMPT, max_new_tokens=24, drafter=drafter, **CASES[name])
        assert found.token_ids == theirs(oracle, PROMPT, 24, **CASES[name]), drafter


def test_rules_and_batches_agree(model: api.Model) -> None:
    """Sampled too: with the same seed, drafted text is plain text; and prompts do not see each other."""
    options = {**CASES["all"], "temperature": 1.0, "seed": 4, "max_new_tokens": 20}
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
    plain = [model.generate(prompt, drafter="none", **options).token_ids for prompt in prompts]
    assert [found.token_ids for found in model.generate(prompts, **options)] == plain
    assert [found.token_ids for found in model.generate(prompts, drafter="prompt_lookup", **options)] == plain


def test_logit_bias_and_min_new_tokens(model: api.Model) -> None:
    assert model.generate(PROMPT, max_new_tokens=3, logit_bias={42: 1e4}).token_ids == [42, 42, 42]
    found = model.generate(PROMPT, max_new_tokens=9, min_new_tokens=4, logit_bias={42: 1e4}, stop_token_ids=[42])
    assert found.token_ids.index(42) == 4
    assert (len(found.token_ids), found.finish_reason, found.stop_reason) == (5, "stop", 42)
    assert model.generate(PROMPT, max_new_tokens=2, logit_bias={42: 1e4}, stop_token_ids=42).token_ids == [42]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be a whole number of at least 0 .*got -1"),
        ({"suppress_tokens": [300]}, "suppress_tokens has the token id 300, but the vocabulary ends at 262"),
        ({"suppress_tokens": "5"}, "suppress_tokens must be a list of token ids, got '5'"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has an empty list"),
        ({"sequence_bias": {(5,): "x"}}, "sequence_bias must be"),
        ({"logit_bias": {5: math.nan}}, "logit_bias must be"),
        ({"stop_token_ids": [-3]}, "stop_token_ids must be a list of token ids, got -3"),
        ({"stop_token_ids": [999]}, "stop_token_ids has 999, but the vocabulary ends at 262"),
        ({"min_new_tokens": 1.5}, "min_new_tokens must be a whole number"),
        ({"exponential_decay_length_penalty": (3,)}, "exponential_decay_length_penalty must be"),
        ({"suppress_tokens": range(263)}, "forbid every token"),
    ],
)
def test_values_that_mean_nothing_are_refused(model: api.Model, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.generate(PROMPT, max_new_tokens=2, **options)


def saved(folder: Path, *, older: bool = False, **settings: Any) -> tuple[Any, api.Model]:
    """The toy with a generation config, or with its fields in ``config.json``: for transformers, and loaded here."""
    import json

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=END, bos_token_id=None, initializer_range=0.3))
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    name = folder / ("config.json" if older else "generation_config.json")
    name.write_text(json.dumps(json.loads(name.read_text()) | settings))
    if older:
        (folder / "generation_config.json").unlink()
    return LlamaForCausalLM.from_pretrained(folder).eval(), api.load(folder, dtype="float32")


def said(model: api.Model, **options: Any) -> Generation:
    return model.generate(PROMPT, **options)


@pytest.mark.parametrize("name", [name for name in CASES if name != "invalid"])
def test_the_generation_config_is_honoured(tmp_path: Path, name: str) -> None:
    settings = CASES[name]
    oracle, model = saved(tmp_path, **settings)
    expected = theirs(oracle, PROMPT, 24)
    for drafter in ("none", "auto"):
        assert said(model, max_new_tokens=24, drafter=drafter).token_ids == expected
    assert set(model.target.generation.honoured) == set(settings)
    # a call's own values come first
    off: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [], "min_length": 0}
    off |= {"sequence_bias": [], "suppress_tokens": [], "begin_suppress_tokens": [], "forced_eos_token_id": ()}
    off |= {"exponential_decay_length_penalty": (), "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0}
    off["min_new_tokens"] = 0
    _, bare = saved(tmp_path / "bare")
    assert said(model, max_new_tokens=24, **off).token_ids == said(bare, max_new_tokens=24).token_ids


@pytest.mark.parametrize("older", [False, True])
def test_older_models_have_these_fields_in_config_json(tmp_path: Path, older: bool) -> None:
    oracle, model = saved(tmp_path, older=older, repetition_penalty=1.7, no_repeat_ngram_size=2)
    assert said(model, max_new_tokens=24).token_ids == theirs(oracle, PROMPT, 24)
    assert "repetition_penalty" in model.target.generation.honoured


def test_lengths_and_stop_strings_are_defaults(tmp_path: Path) -> None:
    oracle, model = saved(tmp_path / "new", max_new_tokens=7)
    given = torch.tensor([PROMPT])
    expected = oracle.generate(given, attention_mask=torch.ones_like(given), do_sample=False, pad_token_id=0)
    assert said(model).token_ids == expected[0, len(PROMPT) :].tolist()
    assert len(said(model, max_new_tokens=9).token_ids) == 9
    _, model = saved(tmp_path / "total", max_length=15)
    assert len(said(model).token_ids) == 5
    with pytest.raises(InputError, match="limits a text to max_length=15; give max_new_tokens"):
        model.generate([5] * 15)
    text = said(model, max_new_tokens=20).text
    stop = next(letter for letter in text[3:] if letter != "�")
    _, model = saved(tmp_path / "stop", stop_strings=[stop])
    assert said(model, max_new_tokens=20).stop_reason == stop
    assert said(model, max_new_tokens=20, stop=()).text == text


def test_sampling_is_suggested_and_cuts_are_defaults(tmp_path: Path) -> None:
    with pytest.warns(AnabranchWarning, match="sets do_sample, with temperature 0.6; decoding is greedy unless"):
        _, model = saved(tmp_path, do_sample=True, temperature=0.6, top_k=3, top_p=0.9, min_p=0.01)
    _, bare = saved(tmp_path / "bare")
    assert said(model, max_new_tokens=9).token_ids == said(bare, max_new_tokens=9).token_ids, "greedy is the default"
    warm: dict[str, Any] = {"max_new_tokens": 20, "temperature": 2.0, "seed": 3}
    cut = said(bare, **warm, top_k=3, top_p=0.9, min_p=0.01).token_ids
    assert said(model, **warm).token_ids == cut
    assert said(model, **warm, top_k=0, top_p=1.0, min_p=0.0).token_ids == said(bare, **warm).token_ids != cut
    assert model.target.generation.suggested == {"do_sample": True, "temperature": 0.6}


def test_unsupported_fields_are_named_once(tmp_path: Path) -> None:
    with pytest.warns(AnabranchWarning, match=r"generation_config.json asks for num_beams=4, typical_p=0.9, which is"):
        saved(tmp_path, num_beams=4, typical_p=0.9, length_penalty=2.0, use_cache=False, renormalize_logits=True)


@pytest.mark.parametrize("settings", [{"repetition_penalty": "x"}, {"max_length": 0}, {"stop_strings": [3]}])
def test_values_that_no_call_could_use_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json of the model is invalid: {next(iter(settings))}"):
        saved(tmp_path, **settings)


def test_every_field_of_a_generation_config_has_its_place() -> None:
    """A field that a later transformers adds must be honoured, found harmless, or named in the warning."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    kinds = (generation_config.HONOURED, generation_config.SUGGESTED, generation_config.HARMLESS)
    known = set().union(*kinds, generation_config.NEUTRAL)
    assert sorted(fields - known) == []
    assert sum(map(len, kinds)) + len(generation_config.NEUTRAL) == len(known), "each has one place"


def test_presence_and_frequency_penalties_count_the_new_text_only() -> None:
    """OpenAI's definition: logit - presence * (count > 0) - frequency * count, without the prompt's tokens."""
    (penalise,) = score_processors(
        {"presence_penalty": 0.5, "frequency_penalty": 0.25}, [3, 4], (), max_length=9, vocabulary=6
    )
    logits = torch.arange(6, dtype=torch.float32)
    assert penalise([3, 4], logits).tolist() == logits.tolist()
    assert penalise([3, 4, 1, 2, 1], logits).tolist() == [0, 0, 1.25, 3, 4, 5]


def test_penalties_of_the_new_text_are_those_of_plain_decoding_with_drafts() -> None:
    with toy_model() as model:
        options: Any = {"max_new_tokens": 24, "presence_penalty": 0.8, "frequency_penalty": 0.6}
        plain = model.generate("the thing", drafter="none", **options)
        assert model.generate("the thing", **options).token_ids == plain.token_ids
        assert plain.token_ids != model.generate("the thing", max_new_tokens=24).token_ids
