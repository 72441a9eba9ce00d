"""Encoder-decoder models on the one loop: drafts are lossless, rows have sources of their own. Toy size, float32."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, save_pair
from toys import CASES as DECODERS
from toys import save_toy, toy_hf

from anabranch import load
from anabranch.api import Model
from anabranch.capabilities import supports
from anabranch.certify import certify
from anabranch.decoding.engine import Engine, Request
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import make_drafter, methods
from anabranch.model.encoder import Source
from anabranch.sampling import SamplingParams
from verbs import Anabranch

SOURCES = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 5, 6], [40] * 30, [33, 34, 35], [50, 60, 50, 60, 50]]


@dataclass(frozen=True)
class Folders:
    """A target, a draft model of its kind, and a decoder-only model, with one vocabulary."""

    target: str
    draft: str
    alone: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pairs")
    family, fields = DECODERS["llama"]
    alone = save_toy(toy_hf(family, fields), root / "llama")
    return Folders(str(save_pair("t5", root / "t5")), str(save_pair("t5", root / "draft", seed=1)), str(alone))


@pytest.fixture(scope="module")
def model(folders: Folders) -> Model:
    return load(folders.target, dtype="float32")


def specs(folders: Folders) -> tuple[str, ...]:
    draft = f"draft_model:model={folders.draft}"
    others = f"{draft},tree=chain", f"staged:model={folders.draft},inner=prompt_lookup", "auto", "suffix+prompt_lookup"
    return "prompt_lookup", "suffix", "lookahead", draft, *others


def texts(model: Model, drafter: str, **options: Any) -> list[list[int]]:
    found = model.generate(SOURCES, max_new_tokens=20, ignore_eos=True, drafter=drafter, rows=3, **options)
    return [each.token_ids for each in found]


def test_greedy_text_is_that_of_transformers(folders: Folders, model: Model) -> None:
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(folders.target).eval()
    for ids in SOURCES:
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "use_cache": False}
        wanted = theirs.generate(torch.tensor([ids]), **options)[0, 1:].tolist()
        ours = model.generate(ids, max_new_tokens=12, drafter="none")
        assert ours.token_ids == wanted
        assert ours.prompt_ids == ids


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"temperature": 0.9, "repetition_penalty": 1.3, "seed": 3}, marks=pytest.mark.thorough)],
)
def test_drafts_change_no_token(folders: Folders, model: Model, options: dict[str, Any]) -> None:
    """Rows have sources of their own lengths, join when others leave, and do not depend on each other."""
    plain = texts(model, "none", **options)
    alone = [model.generate(ids, max_new_tokens=20, ignore_eos=True, drafter="none", **options) for ids in SOURCES]
    assert plain == [each.token_ids for each in alone]
    assert len({tuple(text) for text in plain}) > 1
    for drafter in specs(folders):
        assert texts(model, drafter, **options) == plain, drafter


def test_rejection_with_a_draft_model_that_is_the_target(folders: Folders, model: Model) -> None:
    """Every draft is accepted: the draft model has read the same sources."""
    draft = f"draft_model:model={folders.target},tree=chain,tokens=4"
    for rule in ("match", "rejection"):
        found = model.generate(SOURCES, max_new_tokens=21, ignore_eos=True, drafter=draft, temperature=1.0, rule=rule)
        if rule == "rejection":
            assert all(each.stats.mean_acceptance_length > 4.0 for each in found)


def test_lookup_repeats_the_source(folders: Folders) -> None:
    """A text that copies its source is drafted from there, from its second token on."""
    target = load(folders.target, dtype="float32").target.decoder
    drafter = make_drafter("prompt_lookup:tokens=3,ngram=2", target)
    engine = Engine(target, drafter, rows=1, capacity=64)
    engine.add(Request([0, 8], 10, source=Source([5, 6, 7, 8, 9, 10, 11])))
    (step,) = engine.step()
    assert step.tree.tokens.tolist() == [8, 9, 10, 11]


def test_samples_share_the_source(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, calls = model.target.decoder.encoder, []
    assert encoder is not None
    forward = encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda *parts: calls.append(parts) or forward(*parts))
    found = model.generate(SOURCES[0], n=3, temperature=1.0, max_new_tokens=5, ignore_eos=True)
    assert len(calls) == 1
    assert len({tuple(each.token_ids) for each in found}) > 1
    monkeypatch.undo()


def test_a_text_goes_on_where_its_row_was_taken(model: Model) -> None:
    """A request that lost its row begins again from its source and what it has emitted."""
    whole = model.generate(SOURCES[0], max_new_tokens=12, ignore_eos=True, drafter="none").token_ids
    engine = Engine(model.target.decoder, rows=1, capacity=64)
    engine.add(Request([0, *whole[:5]], 7, source=Source(SOURCES[0]), emitted=5))
    assert [token for step in engine.run() for token in step.tokens] == whole[5:]


def test_prefixes_are_not_shared(model: Model) -> None:
    """Two rows whose texts begin alike have different keys and values, if their sources differ."""
    engine = Engine(model.target.decoder, rows=2, capacity=64)
    begin = [0, *range(10, 40)]
    engine.add(Request(begin, 3, source=Source(SOURCES[0])))
    assert engine.longest_shared(begin) == (0, 0)


def test_stream_and_asynchronous_calls_take_a_source(model: Model) -> None:
    *_, last = model.stream(SOURCES[1], max_new_tokens=6, ignore_eos=True)
    assert last.result is not None
    assert last.result.token_ids == model.generate(SOURCES[1], max_new_tokens=6, ignore_eos=True).token_ids
    assert model.generate("w5 w6 w7", max_new_tokens=4, ignore_eos=True).prompt_ids == [5, 6, 7]


def test_options_named_after_the_encoder_look_at_the_source(model: Model) -> None:
    """A strong reward of the source's tokens: nothing else is said."""
    found = model.generate(SOURCES[0], max_new_tokens=5, ignore_eos=True, encoder_repetition_penalty=100.0)
    assert set(found.token_ids) <= set(SOURCES[0])


def test_forced_and_suppressed_tokens(model: Model) -> None:
    found = model.generate(SOURCES[0], max_new_tokens=4, forced_bos_token_id=44, ignore_eos=True)
    assert found.token_ids[0] == 44
    first = model.generate(SOURCES[0], max_new_tokens=1, ignore_eos=True).token_ids[0]
    for option in ("suppress_tokens", "begin_suppress_tokens"):
        assert model.generate(SOURCES[0], max_new_tokens=1, ignore_eos=True, **{option: [first]}).token_ids != [first]


def test_what_does_not_fit_is_refused(folders: Folders, model: Model) -> None:
    with pytest.raises(CapabilityError, match="the draft model reads no source and the target reads a source text"):
        model.generate(SOURCES[0], drafter=f"draft_model:model={folders.alone}")
    decoder_only = load(folders.alone, dtype="float32")
    with pytest.raises(CapabilityError, match="the draft model reads a source text and the target reads no source"):
        decoder_only.generate(SOURCES[0], drafter=f"draft_model:model={folders.draft}")
    with pytest.raises(CapabilityError, match="the drafter 'eagle' does not draft for encoder-decoder models; use"):
        model.generate(SOURCES[0], drafter="eagle")
    with pytest.raises(CapabilityError, match="this model writes a text about a source, so it has no score of a text"):
        model.score(SOURCES[0])
    with pytest.raises(InputError, match="the prompt is empty; give some text"):
        model.generate("")
    with pytest.raises(InputError, match="this model has no encoder, so a request has no source; give a prompt alone"):
        Engine(decoder_only.target.decoder).add(Request([1], source=Source([5])))
    with pytest.raises(InputError, match="this model reads a source and writes a text about it; give the request"):
        Engine(model.target.decoder).add(Request([0]))


def test_a_draft_model_of_another_vocabulary_is_refused(folders: Folders, model: Model, tmp_path: Path) -> None:
    """One of the target's kind for its tokens; of another kind, what it reads is said first."""
    for name, folder in (("other", folders.draft), ("alone", folders.alone)):
        shutil.copytree(folder, tmp_path / name)
        text = (tmp_path / name / "tokenizer.json").read_text()
        (tmp_path / name / "tokenizer.json").write_text(text.replace('"w7"', '"v7"'))
    with pytest.raises(CapabilityError, match="another vocabulary than the target: token id 7 is 'w7' and 'v7'; use a"):
        model.generate(SOURCES[0], drafter=f"draft_model:model={tmp_path / 'other'}")
    with pytest.raises(CapabilityError, match="the draft model reads no source and the target reads a source text"):
        model.generate(SOURCES[0], drafter=f"draft_model:model={tmp_path / 'alone'}")


@pytest.mark.thorough
def test_the_command_line_takes_the_source(
    folders: Folders, model: Model, anabranch: Anabranch, tmp_path: Path
) -> None:
    loads = "--model", folders.target, "--dtype", "float32"
    done = anabranch("generate", "w5 w6 w7 w8", *loads, "--max-new-tokens", 5, "--json")
    assert json.loads(done.out)["token_ids"] == model.generate([5, 6, 7, 8], max_new_tokens=5).token_ids, done.err
    facts = json.loads(anabranch("info", folders.target, "--json").out)
    encoder = {name: facts[name] for name in ("encoder_layers", "encoder_reads", "max_source_positions")}
    assert encoder == {"encoder_layers": 2, "encoder_reads": "a source text", "max_source_positions": 4096}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w5 w6 w5 w6", "w9", "w8 w30 w31")))
    certify = "certify", *loads, "--prompts", prompts, "--max-new-tokens", 8, "--drafter", "lookahead"
    assert anabranch(*certify).out == "3 equal, 0 ties, 0 bugs of 3 prompts with lookahead\n"
    sampled = anabranch(*certify, "--sampling", "--temperature", 2, "--effect", 1, "--limit", 1)
    assert sampled.code == 0, sampled.out + sampled.err
    out = tmp_path / "result.json"
    bench = "bench", *loads, "--suite", prompts, "--max-new-tokens", 6, "--out", out
    done = anabranch(*bench, "--method", "none", "--method", "prompt_lookup")
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert [each["name"] for each in result["contenders"]] == ["none", "prompt_lookup"]
    assert (result["complete"], result["prompts_done"]) == (True, 3)
    refused = anabranch("tune", *loads, "--prompts", prompts)
    assert refused.code == 1
    assert "tuning is for decoder-only models, and" in refused.err


def test_the_capabilities_name_what_does_not_draft() -> None:
    for method in methods():
        answer = supports(method.name, encoder=True)
        if method.with_source:
            assert answer or "draft model" in answer.reason, answer.reason  # which the stand-in has not
        else:
            assert answer.reason.startswith(f"the drafter {method.name!r} does not draft for encoder-decoder models")


def test_transformers_models_are_loaded_by_themselves() -> None:
    from anabranch.integrations.transformers.target import model_of

    with pytest.raises(CapabilityError, match="custom_generate is for decoder-only models; load this one with"):
        model_of(Pair("t5").model)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_half_precision_and_rounded_weights(tmp_path: Path, quantize: str) -> None:
    """Native products, where the sizes fit. In 16 bits, drafts may flip near-ties, which are no bugs."""
    folder = save_pair("t5", tmp_path / "wide", d_kv=32, d_model=64, d_ff=96)
    loaded = load(str(folder), dtype="bfloat16", quantize=quantize)
    found = certify(loaded.target, (), "suffix", SOURCES, max_new_tokens=16, rows=2)
    assert {each.verdict for each in found} <= {"equal", "tie"}
    assert sum(each.verdict == "equal" for each in found) >= 3


def test_chat_and_loras_are_refused(folders: Folders, model: Model) -> None:
    with pytest.raises(CapabilityError, match=r"chat is for decoder-only models, and .* reads a source; use another"):
        model.chat([{"role": "user", "content": "w5"}])
    with pytest.raises(CapabilityError, match="kv='int8' keeps keys and values in int8, which only the native kernels"):
        load(folders.target, kv="int8")


def test_a_draft_model_with_a_shorter_limit_is_refused(tmp_path: Path) -> None:
    target = load(str(save_pair("bart", tmp_path / "bart")), dtype="float32")
    small = save_pair("bart", tmp_path / "small", seed=1, max_position_embeddings=16)
    with pytest.raises(InputError, match="the draft model cannot read this source: the source has 20 tokens, but"):
        target.generate([5] * 20, drafter=f"draft_model:model={small}")
    with pytest.raises(InputError, match="the draft model cannot read this source: the source has 20 tokens, but"):
        target.generate([5] * 20, drafter=f"draft_model:model={small}+suffix")
    with pytest.raises(InputError, match="the source has 65 tokens, but the encoder's limit is 64; shorten it"):
        target.generate([5] * 65)
    text = target.generate([5, 6, 7], max_new_tokens=100, ignore_eos=True, drafter="none")
    assert (len(text.token_ids), text.finish_reason) == (63, "length"), "the decoder's positions end"


def test_an_error_in_the_encoder_ends_its_request_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = model.target.decoder.encoder
    assert encoder is not None
    forward = encoder.forward

    def fail(source: Source, embedding: Any) -> Any:
        if list(source.tokens) == SOURCES[1]:
            raise RuntimeError("broken")
        return forward(source, embedding)

    monkeypatch.setattr(encoder, "forward", fail)
    drafter, scheduler = make_drafter("none", model.target.decoder), model.scheduler
    requests = [Request([0], 6, SamplingParams(), source=Source(ids)) for ids in SOURCES[:3]]
    tickets = [scheduler.submit(request, drafter) for request in requests]
    good = [[token for step in scheduler.steps(ticket) for token in step.tokens] for ticket in (tickets[0], tickets[2])]
    with pytest.raises(RuntimeError, match="broken"):
        list(scheduler.steps(tickets[1]))
    monkeypatch.undo()
    assert good == [
        model.generate(ids, max_new_tokens=6, drafter="none", ignore_eos=True).token_ids
        for ids in (SOURCES[0], SOURCES[2])
    ]
