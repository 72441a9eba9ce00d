"""Conformance of ``custom_generate`` with transformers' own ``generate``.

The tests are named after those of assisted decoding, of sampling and of stopping in transformers'
tests/generation/test_utils.py and test_streamers.py where there is one.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.configuration_utils import WatermarkingConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from anabranch.errors import AdapterError, CapabilityError, InputError, ModelError
from anabranch.integrations.transformers import SpeculativeOutput, custom_generate, release
from anabranch.integrations.transformers.config import HONOURED, REFUSED
from anabranch.integrations.transformers.target import _kept, model_of
from model.toys import CASES, VOCABULARY, toy_hf
from toy_text import ToyFolders

NEW = 14
# drafts from earlier outputs, so that the second of two equal calls accepts most of them
LOOKUP = {"custom_generate": custom_generate, "drafter": "suffix:nodes=8"}
PLAIN = {"custom_generate": custom_generate, "drafter": "none"}


@cache
def toy(case: str = "llama") -> Any:
    """A toy model of a family; shared by tests that do not change it."""
    kind, config = CASES[case]
    made = toy_hf(kind, config)
    made.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2, bos_token_id=1)
    return made


def changed() -> Any:
    """A copy of the toy that may be changed."""
    return copy.deepcopy(toy())


def ids(length: int = 9, seed: int = 1, rows: int = 1) -> Tensor:
    """Prompts [rows, length] in which n-grams repeat, so that lookup drafts are accepted."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(3, VOCABULARY, (rows, (length + 1) // 2), generator=generator)
    return torch.cat((half, half), 1)[:, :length]


def padded() -> dict[str, Tensor]:
    """Three prompts of 9, 6 and 2 tokens, padded on the left."""
    input_ids, mask = ids(rows=3), torch.ones(3, 9, dtype=torch.long)
    for row, pad in enumerate((0, 3, 7)):
        input_ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": input_ids, "attention_mask": mask}


def both(model: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Generate with transformers and with us, without and with accepted drafts; check that the texts are equal."""
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    options = {"max_new_tokens": NEW, **options}
    theirs, first, ours = (model.generate(**inputs, **options, **by) for by in ({}, LOOKUP, LOOKUP))
    texts = [getattr(result, "sequences", result) for result in (theirs, first, ours)]
    assert torch.equal(texts[1], texts[2])
    assert torch.equal(texts[0], texts[2])
    return theirs, ours


def refused(message: str, model: Any = None, *, error: type[Exception] = CapabilityError, **options: Any) -> None:
    """Check that a call is refused with a message."""
    options = {"max_new_tokens": 3, **LOOKUP, **options}
    prompt = {} if "inputs_embeds" in options else {"inputs": ids()}
    with pytest.raises(error, match=message):
        (model or toy()).generate(**prompt, **options)


@pytest.mark.parametrize(
    "case", [c if c in ("llama", "gpt2", "gemma2") else pytest.param(c, marks=pytest.mark.thorough) for c in CASES]
)
def test_assisted_decoding_matches_greedy_search(case: str) -> None:
    theirs, ours = both(toy(case), ids())
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("drafter", ["none", "auto", "suffix", "lookahead", "prompt_lookup:matches=2+suffix"])
def test_prompt_lookup_decoding_matches_greedy_search(drafter: str) -> None:
    theirs = toy().generate(ids(), max_new_tokens=NEW)
    assert torch.equal(theirs, toy().generate(ids(), max_new_tokens=NEW, **(LOOKUP | {"drafter": drafter})))


@pytest.mark.parametrize("case", ["llama", "gpt2", pytest.param("opt", marks=pytest.mark.thorough)])
def test_left_padding_compatibility(case: str) -> None:
    both(toy(case), padded())


def test_drafts_are_accepted() -> None:
    _, ours = both(toy(), padded(), max_new_tokens=40, return_dict_in_generate=True, eos_token_id=None)
    assert [stats.tokens for stats in ours.stats] == [40, 40, 40]
    assert all(stats.mean_acceptance_length > 2 for stats in ours.stats)


def test_eos_token_id_int_and_list_greedy_search() -> None:
    plain = toy().generate(ids(rows=3), max_new_tokens=NEW, eos_token_id=None)
    first, second = int(plain[0, 11]), int(plain[1, 13])
    for ends in (first, [first, second]):
        _, ours = both(toy(), ids(rows=3), eos_token_id=ends)
        assert ours.shape[1] <= 9 + NEW


def test_max_new_tokens_decoder_only() -> None:
    for length in ({"max_new_tokens": 3}, {"max_new_tokens": None, "max_length": 12}):
        both(toy(), ids(), **length)


def test_default_generation_config_of_a_model_is_used() -> None:
    model = changed()
    model.generation_config = GenerationConfig(max_new_tokens=5, pad_token_id=0, repetition_penalty=1.3, min_length=12)
    assert torch.equal(model.generate(ids()), model.generate(ids(), **LOOKUP))


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "penalty_after_bias": {"repetition_penalty": 1.7, "sequence_bias": {(5,): 3.0, (6, 7): -4.0}},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8]]},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": list(range(40, 97))},
    "min_length": {"min_length": 15, "eos_token_id": list(range(40, 97))},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60)), "begin_suppress_tokens": list(range(60, 90))},
    "forced": {"forced_eos_token_id": 2, "forced_bos_token_id": 4},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, text: [3 + row, 4 + row, 5 + len(text) % 50]},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_logits_processors_of_the_config(name: str) -> None:
    both(toy(), padded(), **PROCESSED[name])


class Shift(LogitsProcessor):
    """Depends on the text, and on the row's place in the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores))
        scores[rows, (input_ids[:, -1] + rows) % VOCABULARY] += 6.0
        return scores


def test_custom_logits_processor() -> None:
    for inputs in (ids(), padded()):
        both(toy(), inputs, logits_processor=LogitsProcessorList([Shift()]))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"typical_p": 0.8, "repetition_penalty": 1.2},
        {"min_p": 0.1, "epsilon_cutoff": 0.01, "no_repeat_ngram_size": 3},
    ],
)
def test_assisted_decoding_sample(options: dict[str, Any]) -> None:
    results, options = [], {**padded(), "do_sample": True, "max_new_tokens": NEW, **options}
    for seed, drafter in ((5, PLAIN), (5, LOOKUP), (5, LOOKUP), (6, LOOKUP)):
        torch.manual_seed(seed)
        results.append(toy().generate(**options, **drafter))
    assert torch.equal(results[0], results[1]), "a seed fixes the text, whatever is drafted"
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[2], results[3])


def test_num_return_sequences_differ() -> None:
    torch.manual_seed(0)
    sampled = toy().generate(ids(), do_sample=True, num_return_sequences=4, max_new_tokens=NEW, top_k=0, **LOOKUP)
    assert len(sampled) == 4
    assert len({tuple(row.tolist()) for row in sampled}) == 4


@pytest.mark.thorough
def test_sampled_distribution_is_that_of_transformers() -> None:
    """The first new token of many rows against the distribution that transformers samples from."""
    options = {"do_sample": True, "temperature": 1.5, "top_k": 6, "max_new_tokens": 1, "return_dict_in_generate": True}
    torch.manual_seed(3)
    theirs = toy().generate(ids(), output_scores=True, **options)
    p = theirs.scores[0][0].softmax(-1)
    rows = 600
    counts = torch.zeros(VOCABULARY)
    drawn = toy().generate(ids(), num_return_sequences=rows, **options, **LOOKUP).sequences[:, -1]
    counts.scatter_add_(0, drawn, torch.ones(rows))
    kept = p > 0
    assert not bool(counts[~kept].any())
    chi_square = ((counts[kept] - rows * p[kept]) ** 2 / (rows * p[kept])).sum()
    assert float(chi_square) < 20.5, "the 0.999 quantile of 5 degrees of freedom"


@pytest.mark.parametrize("sample", [False, True])
def test_greedy_generate_dict_outputs(sample: bool) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": NEW}
    asked |= {"repetition_penalty": 1.4} | ({"do_sample": True, "top_k": 9} if sample else {})
    toy().generate(ids(), max_new_tokens=NEW, repetition_penalty=1.4, **LOOKUP)
    ours = toy().generate(ids(), **asked, **LOOKUP)
    assert isinstance(ours, SpeculativeOutput)
    assert len(ours.scores) == len(ours.logits) == ours.sequences.shape[1] - 9
    if sample:
        return
    theirs = toy().generate(ids(), **asked)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(ours, name)), torch.stack(getattr(theirs, name)))
    assert ours.past_key_values is None


def test_transition_scores_greedy_search() -> None:
    plain = toy().generate(**padded(), max_new_tokens=NEW, eos_token_id=None)
    asked = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": int(plain[1, 12])}
    theirs, ours = both(toy(), padded(), **asked)
    log_probs = [toy().compute_transition_scores(x.sequences, x.scores, normalize_logits=True) for x in (theirs, ours)]
    before = theirs.sequences[:, 9:].eq(asked["eos_token_id"]).cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    real = before == 0  # up to the end token
    assert not bool(real.all())
    torch.testing.assert_close(log_probs[0][real], log_probs[1][real])
    assert bool((log_probs[1][~real] == 0).all()), "padding is certain"


class Every(StoppingCriteria):
    """Ends a row at its first token that is divisible, and counts its calls."""

    def __init__(self, divisor: int) -> None:
        self.divisor, self.lengths = divisor, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] % self.divisor == 0


@pytest.mark.parametrize("ends", [2, None])
def test_custom_stopping_criteria(ends: int | None) -> None:
    criterion, options = Every(4), {**padded(), "max_new_tokens": NEW, "eos_token_id": ends}
    theirs = toy().generate(**options, stopping_criteria=StoppingCriteriaList([Every(4)]))
    ours = toy().generate(**options, stopping_criteria=StoppingCriteriaList([criterion]), **LOOKUP)
    assert torch.equal(theirs, ours)
    assert criterion.lengths == list(range(10, ours.shape[1] + 1)), "called once for each position, in order"


def test_max_time() -> None:
    assert toy().generate(ids(), max_new_tokens=NEW, max_time=0.0, **LOOKUP).shape[1] == 10


def test_stop_sequence_stopping_criteria() -> None:
    # transformers keeps the tokenizer from custom functions
    refused("tokenizer", error=ValueError, stop_strings=["w5"])


def test_stop_strings_as_a_criterion(toys: ToyFolders) -> None:
    model = AutoModelForCausalLM.from_pretrained(toys.model)
    tokenizer = AutoTokenizer.from_pretrained(toys.model)
    plain = model.generate(ids(), max_new_tokens=NEW)[0, 9:]
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [tokenizer.decode(plain[5:7])])])
    _, ours = both(model, ids(), stopping_criteria=criteria)
    assert ours.shape[1] < 9 + NEW


def test_an_adapter_drafts(toys: ToyFolders) -> None:
    model = AutoModelForCausalLM.from_pretrained(toys.model)
    theirs = model.generate(ids(), max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, "custom_generate": custom_generate, "return_dict_in_generate": True}
    ours = model.generate(ids(), drafter="streams", adapter=toys.adapter, **options)
    assert torch.equal(theirs, ours.sequences)
    assert ours.stats[0].draft_nodes
    with pytest.raises(AdapterError, match="was trained for another"):
        model.generate(ids(), drafter="streams", adapter=[toys.other], **options)
    with pytest.raises(CapabilityError, match="needs"):
        model.generate(ids(), drafter="streams", **options)
    drafted = model.generate(ids(), drafter=f"draft_model:model={toys.model}", **options)
    assert torch.equal(theirs, drafted.sequences)
    assert drafted.stats[0].mean_acceptance_length > 2
    other = PreTrainedTokenizerFast(tokenizer_object=AutoTokenizer.from_pretrained(toys.model).backend_tokenizer)
    other.add_tokens(["extra"])
    release(model)
    with pytest.raises(CapabilityError, match="another vocabulary than the target"):
        model.generate(ids(), drafter=f"draft_model:model={toys.model}", target_tokenizer=other, **options)


def test_pipelines(toys: ToyFolders) -> None:
    pipe = pipeline("text-generation", model=str(toys.model), device="cpu")
    texts = ["the cat and the", "the"]
    options = {"max_new_tokens": NEW, "batch_size": 2, "do_sample": False}
    pipe.tokenizer.pad_token, pipe.tokenizer.padding_side = pipe.tokenizer.eos_token, "left"
    assert pipe(texts, **options, **LOOKUP) == pipe(texts, **options)


class Words:
    """A tokenizer of the words w0, w1, ..."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(f"w{token}" for token in tokens)


def test_text_streamer_matches_non_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    toy().generate(ids(), max_new_tokens=NEW, streamer=TextStreamer(Words()))
    theirs = capsys.readouterr().out
    toy().generate(ids(), max_new_tokens=NEW, streamer=TextStreamer(Words()), **LOOKUP)
    assert capsys.readouterr().out == theirs != ""


def test_text_iterator_streamer_matches_non_streaming() -> None:
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=300)  # if the thread fails, this one ends too
    options = {"inputs": ids(), "max_new_tokens": NEW, "streamer": streamer, **LOOKUP}
    thread = threading.Thread(target=toy().generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == [f"w{token}" for token in toy().generate(ids(), max_new_tokens=NEW)[0, 9:]]


class Batches(BaseStreamer):
    def __init__(self) -> None:
        self.put_values: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamer_of_a_batch() -> None:
    theirs, ours = Batches(), Batches()
    toy().generate(**padded(), max_new_tokens=NEW, streamer=theirs)
    toy().generate(**padded(), max_new_tokens=NEW, streamer=ours, **LOOKUP)
    assert ours.put_values == theirs.put_values
    assert ours.ended


def test_a_failing_streamer_leaves_nothing_running() -> None:
    class Fails(Batches):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.put_values) > 2:
                raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        toy().generate(**padded(), max_new_tokens=NEW, streamer=Fails(), **LOOKUP)
    assert not model_of(toy()).scheduler.busy


def test_every_field_of_generation_config_is_known() -> None:
    fields = {name for name in vars(GenerationConfig()) if name[0] != "_" and name != "transformers_version"}
    assert fields <= HONOURED | set(REFUSED)  # older versions lack some
    assert not HONOURED & set(REFUSED)


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(vars(GenerationConfig()))))
def test_a_refused_field_is_named(name: str) -> None:
    from anabranch.integrations.transformers.config import check_config

    config = GenerationConfig()
    check_config(config)
    setattr(config, name, "another value")
    with pytest.raises(CapabilityError, match=rf"{name}=.*leave {name} out"):
        check_config(config)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"guidance_scale": 1.5}, {"cache_implementation": "static"}],
    ids=str,
)
def test_a_refused_field_is_refused_by_generate(options: dict[str, Any]) -> None:
    refused("is not supported with custom_generate", **options)


def test_an_assistant_model_is_refused() -> None:
    refused("assistant_model is not supported", assistant_model=toy())


def test_inputs_that_transformers_alone_can_use() -> None:
    embeds = toy().get_input_embeddings()(ids())
    refused("'inputs_embeds'", inputs_embeds=embeds)
    output = toy()(ids(), use_cache=True)
    name = "cache" if "cache" in output else "past_key_values"  # since transformers 5.24, and before
    refused("past_key_values", **{name: output[name]})


def test_masks() -> None:
    for mask in ([[1] * 5 + [0] * 4], [[1, 0, 1] + [1] * 6]):
        refused("pad prompts on the left", error=InputError, attention_mask=torch.tensor(mask))
    refused("a prompt is empty", error=InputError, attention_mask=torch.zeros(1, 9))
    refused("position_ids do not count", error=InputError, position_ids=torch.arange(9)[None] + 4)


def test_lengths_and_options() -> None:
    refused("exceed the model's context length of 128", error=InputError, max_new_tokens=120)
    refused("there is no drafter", error=InputError, drafter="crystal_ball")
    refused("there is no adapter folder", error=AdapterError, adapter="missing")
    refused("rule=", rule="rejection")


def test_models_that_compute_something_else() -> None:
    trained = changed().train()
    refused("training mode", trained)
    hooked = changed()
    hooked.model.layers[1].register_forward_hook(lambda module, args, output: None)
    refused(r"model\.layers\.1 has forward hooks", hooked)

    class Other(torch.nn.Linear):
        pass

    wrapped = changed()
    wrapped.model.layers[0].self_attn.q_proj.__class__ = Other
    refused(r"test_transformers\..*Other", wrapped)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused("autocast")
    _, sizes = CASES["gpt_neox"]
    unknown = toy_hf("stablelm", sizes)
    refused("family", unknown, error=ModelError)


def test_tensors_are_shared() -> None:
    decoder = model_of(toy()).target.decoder
    layer = toy().model.layers[0]
    assert decoder.blocks[0].norm_in.weight.data_ptr() == layer.input_layernorm.weight.data_ptr()
    if decoder.backend.kernels is None:
        assert decoder.embedding.weight.data_ptr() == toy().model.embed_tokens.weight.data_ptr()


def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_config_says() -> None:
    """transformers' tie_weights() would destroy it."""
    model = changed()
    model.config.tie_word_embeddings = True
    assert not model_of(model).target.config.tied_head
    both(model, ids())
    model.tie_weights()
    assert model_of(model).target.config.tied_head
    both(model, ids())


def test_a_model_is_followed_and_not_its_config() -> None:
    """A file with these fields is loaded as Ministral, but this model was made as Mistral, which ignores the types."""
    _, sizes = CASES["mistral-sliding"]
    types = {"layer_types": ["full_attention"] * sizes["num_hidden_layers"]}
    with pytest.raises(ModelError, match="all layers of this mistral model use sliding_attention"):
        model_of(toy_hf("mistral", {**sizes, **types}))


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def swap(values: Tensor) -> None:
    """Two rows change places: the values stay the same."""
    values[:2] = values[:2].flip(0)


def double(values: Any) -> None:
    values *= 2


DOWN = "model.layers.1.mlp.down_proj"
# edits of the toy, and whether its config and weights still say what it computes
FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.get_parameter(f"{DOWN}.weight").detach().mul_(-1.0),
    "through data": lambda m: weights(m)[f"{DOWN}.weight"].mul_(-1.0),
    "through numpy": lambda m: double(weights(m)[f"{DOWN}.weight"].numpy()),
    "one value": lambda m: weights(m)[f"{DOWN}.weight"].numpy().__setitem__((5, 7), 60.0),
    "the last value": lambda m: weights(m)["model.norm.weight"].numpy().__setitem__(-1, 60.0),
    "one row": lambda m: double(weights(m)["model.layers.2.self_attn.q_proj.weight"].numpy()[3]),
    "rows that change places": lambda m: swap(weights(m)["model.layers.0.self_attn.k_proj.weight"]),
    "replaced": lambda m: setattr(m.get_submodule(DOWN), "weight", nn.Parameter(-weights(m)[f"{DOWN}.weight"])),
    "a whole module": lambda m: setattr(m, "lm_head", copy.deepcopy(changed().lm_head).requires_grad_(False)),
    "an untied head": lambda m: weights(m)["lm_head.weight"].mul_(-1.0),
    "frequencies": lambda m: double(m.model.rotary_emb.inv_freq),
    "frequencies through numpy": lambda m: double(m.model.rotary_emb.inv_freq.numpy()[2:]),
    "a replaced buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq.flip(0)),
    "scaled rotations": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.5),
    "half and back": lambda m: m.half().float(),
    "fewer layers": lambda m: (m.model.layers.pop(2), setattr(m.config, "num_hidden_layers", 2)),
    "another config of generation": lambda m: setattr(m.generation_config, "suppress_tokens", [41]),
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_edits_of_a_model_are_followed(how: str) -> None:
    model = changed()
    if how == "an untied head":
        model = toy_hf("llama", {**CASES["llama"][1], "tie_word_embeddings": True})
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    before = model.generate(ids(), max_new_tokens=NEW, **LOOKUP)
    FOLLOWED[how](model)
    _, ours = both(model, ids())
    if how not in ("half and back", "a whole module"):
        assert not torch.equal(ours, before), "the edit has no effect, so it shows nothing"


def wrapped(method: Any) -> Any:
    return functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))


REFUSED_EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scaling": (lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5), r"layers\.1\.self_attn\.scaling"),
    "layer_idx": (lambda m: setattr(m.model.layers[1].self_attn, "layer_idx", 0), r"self_attn\.layer_idx"),
    "is_causal": (lambda m: setattr(m.model.layers[1].self_attn, "is_causal", False), r"self_attn\.is_causal"),
    "an epsilon": (lambda m: setattr(m.model.norm, "variance_epsilon", 0.5), r"model\.norm\.variance_epsilon"),
    "an epsilon of the config": (lambda m: setattr(m.config, "rms_norm_eps", 0.5), "variance_epsilon of the model is"),
    "an activation": (lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()), r"mlp\.act_fn of the model is a"),
    "no last layer": (lambda m: m.model.layers.pop(2), r"model\.layers\.2"),
    "one layer twice": (lambda m: m.model.layers.__setitem__(2, m.model.layers[1]), r"model\.layers\.2"),
    "layers that change places": (
        lambda m: setattr(m.model, "layers", nn.ModuleList([m.model.layers[i] for i in (1, 0, 2)])),
        r"layers\.0\.self_attn\.layer_idx of the model is 1 instead of 0",
    ),
    "a bias": (
        lambda m: setattr(m.get_submodule(DOWN), "bias", nn.Parameter(torch.ones(64))),
        r"down_proj\.bias of the model was added",
    ),
    "another norm": (lambda m: setattr(m.model, "norm", nn.LayerNorm(64)), r"model\.norm of the model is a LayerNorm"),
    "another config": (
        lambda m: setattr(m.model.layers[0].self_attn, "config", copy.deepcopy(m.config)),
        r"self_attn\.config of the model",
    ),
    "a layer in training": (lambda m: m.model.layers[1].train(), "training mode"),
    "a forward of its own": (lambda m: setattr(m.model.norm, "forward", lambda x: x), r"module model\.norm has"),
    "a wrapped forward": (
        lambda m: setattr(m.model.norm, "forward", wrapped(m.model.norm.forward)),
        r"model\.norm has",
    ),
    "a hook": (lambda m: m.model.norm.register_forward_pre_hook(lambda module, args: None), r"model\.norm has"),
    "pruned": (lambda m: nn.utils.prune.random_unstructured(m.get_submodule(DOWN), "weight", 0.5), "down_proj has"),
    "parametrised": (
        lambda m: nn.utils.parametrize.register_parametrization(m.get_submodule(DOWN), "weight", nn.Tanh()),
        "modules of torch.nn.utils.parametrize",
    ),
}


@pytest.mark.parametrize("how", REFUSED_EDITS)
def test_edits_that_cannot_be_followed_are_refused(how: str) -> None:
    edit, message = REFUSED_EDITS[how]
    model = changed()
    model.generate(ids(), max_new_tokens=3, **LOOKUP)
    edit(model)
    if how != "a layer in training":
        model.eval()
    refused(message, model)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("LlamaAttention", "forward"),
        ("LlamaRMSNorm", "forward"),
        ("LlamaModel", "forward"),
        ("LlamaForCausalLM", "prepare_inputs_for_generation"),
        ("", "apply_rotary_pos_emb"),
        ("", "eager_attention_forward"),
    ],
)
@pytest.mark.parametrize("copies_names", [False, True])
def test_patched_code_is_refused(monkeypatch: pytest.MonkeyPatch, where: str, name: str, copies_names: bool) -> None:
    from transformers.models.llama import modeling_llama

    model = changed()
    model.generate(ids(), max_new_tokens=3, **LOOKUP)
    owner = getattr(modeling_llama, where) if where else modeling_llama
    patch = wrapped(getattr(owner, name)) if copies_names else lambda *args, **kwargs: None
    monkeypatch.setattr(owner, name, patch)
    refused(f"{name} was replaced by code that is not transformers' own", model)


def test_an_attention_of_ones_own_is_refused() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model = changed()
    AttentionInterface.register("mine", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    model.set_attn_implementation("mine")
    refused("the attention 'mine' was replaced by code", model)


def test_global_hooks_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        refused("global forward hooks")
    finally:
        handle.remove()


def test_a_rounded_scale_of_embeddings_is_followed() -> None:
    kind, config = CASES["gemma"]
    model = toy_hf(kind, config)
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.model.embed_tokens.embed_scale.fill_(3.0)
    both(model, ids())


def test_frequencies_that_depend_on_the_length() -> None:
    """Their forward writes to them, which is not an edit; another length at the start is."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = toy_hf("llama", {**CASES["llama"][1], "max_position_embeddings": 16, "rope_parameters": rope})
    model.generation_config = GenerationConfig(pad_token_id=0)
    both(model, ids())
    made = model_of(model)
    model(ids(40))
    assert model_of(model) is made
    model.model.rotary_emb.original_inv_freq.mul_(2)
    refused(r"frequencies of model\.rotary_emb are not those of the model's config", model)


def test_a_model_is_read_once_and_let_go() -> None:
    model = changed()
    model.generate(ids(), max_new_tokens=3, **LOOKUP)
    made = model_of(model)
    model.generate(ids(seed=2), max_new_tokens=3, **LOOKUP)
    assert model_of(model) is made
    release(model)
    assert model not in _kept
    model.generate(ids(), max_new_tokens=3, **LOOKUP)
    kept = weakref.ref(model_of(model))
    del model, made
    gc.collect()
    assert kept() is None


def test_inference_mode_and_output_capturing() -> None:
    model = changed()
    model(ids(), output_hidden_states=True)  # installs transformers' own hooks
    theirs = model.generate(ids(), max_new_tokens=NEW)
    with torch.inference_mode():
        assert torch.equal(theirs, model.generate(ids(), max_new_tokens=NEW, **LOOKUP))


@pytest.mark.thorough
def test_half_precision_types() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = changed().to(dtype)
        assert model.generate(ids(), max_new_tokens=NEW, **LOOKUP).shape[1] > 9
