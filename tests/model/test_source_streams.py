"""Streams on a decoder that attends to a source: the same in training and in decoding, and lossless. Toy size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, save_pair
from test_encoder_decoder import packed
from torch import Tensor

from anabranch.api import load
from anabranch.certify.draws import sampling_scheduler
from anabranch.decoding.engine import Request
from anabranch.drafting.drafter import Drafter, Observation, Row
from anabranch.errors import CapabilityError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import frozen_target
from anabranch.methods import make_drafter, methods
from anabranch.methods.none import NoDrafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamSettings
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.objective import StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target, load_target
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.train.answers import EncodedPrompt, write_answers
from anabranch.train.job import read_data, train_adapter, trainable
from anabranch.train.states import KeptStates
from anabranch.tree import DraftTree
from anabranch.verify import Verdict
from small import RICH, randomise

FAMILIES = ("t5", "bart", "whisper")
MAKERS = [pytest.param(Pair, id="torch")]
MAKERS.append(
    pytest.param(packed, id="native", marks=pytest.mark.skipif(native.library() is None, reason="no kernels"))
)
PLAIN = replace(RICH, pruning_rank=0)
LENGTHS = (5, 17, 2)  # of sources


def adapter_of(target: Decoder, shape: StreamConfig = PLAIN) -> StreamAdapter:
    adapter = StreamAdapter(target.config, shape)
    randomise(adapter, seed=5, scale=0.1)
    return adapter.eval().requires_grad_(False)


def sources(pair: Pair) -> list[Source]:
    return [pair.source(length, seed=length) for length in LENGTHS]


def decoded_states(pair: Pair, adapter: StreamAdapter, read: list[Source], texts: list[list[int]]) -> list[Tensor]:
    """The states of streams that trail the last token but one of each text, as the drafter computes them."""
    target, drafter = pair.decoder, StreamDrafter(pair.decoder, adapter)
    rows = [Row(text, 1, SamplingParams(), max_depth=3) for text in texts]
    for row in rows:
        drafter.join(row)
    cache = target.new_cache(len(rows), 64)
    with torch.inference_mode():
        for slot, (source, text) in enumerate(zip(read, texts, strict=True)):
            cache.add_row(1, target.encode(source))
            if len(text) > 2:
                target(Inputs.of_prompt(text[:-2]), cache, slots=slice(slot, slot + 1), need="keys")
                cache.commit([range(len(text) - 2)])
        last = Inputs.of_chains(torch.tensor([text[-2:-1] for text in texts]).numpy())
        result = target(last, cache, taps=drafter.needs.layers, need="hidden")
        cache.commit([[0]] * len(rows))
        verdicts = [Verdict((0,), text[-1]) for text in texts]
        trees = [DraftTree.root(text[-2]) for text in texts]
        seen = Observation(result, cache, [*range(len(rows))], trees, verdicts, [True] * len(rows), 8)
        drafter.observe(rows, seen)
    states = [row.state[drafter].states_SD for row in rows]
    assert all(each is not None for each in states)
    return states


@pytest.mark.parametrize("width", [PLAIN.root_width, 32])  # the kernels begin streams where it is a multiple of 32
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_decoding_compute_the_same_streams(family: str, make: type[Pair], width: int) -> None:
    """Over ragged sources and texts; the source matters, and each row has its own."""
    pair, plain = make(family), Pair(family, **({} if make is Pair else make(family).fields))
    adapter = adapter_of(plain.decoder, replace(PLAIN, root_width=width))
    texts = [pair.text(length, seed=length) for length in (7, 3, 12)]
    read = sources(pair)
    examples = [Example((text[0],), tuple(text[1:]), encoded=source) for text, source in zip(texts, read, strict=True)]
    objective, batch = StreamObjective(plain.decoder, adapter), Batch.of(examples)
    with torch.no_grad():
        at = torch.tensor([[len(text) - 2] for text in texts])
        trained = objective.states(objective.freeze(batch), batch.tokens_BT, at)[:, 0]
    found = decoded_states(pair, adapter, read, texts)
    if make is not Pair:
        trail = StreamDrafter(pair.decoder, adapter).native
        assert trail is not None
        assert (trail._entry is not None) == (width == 32)
    for ours, theirs in zip(found, trained, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-3 * float(theirs.std()))
    swapped = decoded_states(pair, adapter, read[::-1], texts)
    assert float((swapped[0] - found[0]).abs().max()) > 0.05 * float(found[0].std())


def target_of(pair: Pair) -> Target:
    return Target(pair.decoder, None, pair.decoder.config, "toy", None, "0" * 64, "none")


def emitted(pair: Pair, drafter: Drafter, **sampling: float) -> tuple[list[list[int]], int]:
    """The texts of six requests, of which three are decoded at a time: rows join and leave; and accepted drafts."""
    scheduler, tickets = sampling_scheduler(target_of(pair), 3), []
    for seed in range(6):
        source, params = pair.source(2 + 3 * seed, seed=seed), SamplingParams(seed=seed, **sampling)
        request = Request([pair.start], 9 + 3 * seed, params, source=source)
        tickets.append(scheduler.submit(request, drafter))
    accepted, texts = 0, {ticket: list[int]() for ticket in tickets}
    while scheduler.busy:
        for ticket, step in scheduler.tick():
            texts[ticket] += step.tokens
            accepted += len(step.tokens) - 1
    return list(texts.values()), accepted


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_streams_change_no_token(family: str, make: type[Pair]) -> None:
    """Greedy and sampled, with sources of their own lengths in one batch."""
    pair = make(family)
    drafter = StreamDrafter(pair.decoder, adapter_of(pair.decoder), StreamSettings(nodes=6))
    for sampling in ({}, {"temperature": 1.5}):
        plain, _ = emitted(pair, NoDrafter(), **sampling)
        drafted, accepted = emitted(pair, drafter, **sampling)
        assert drafted == plain
        assert accepted > 0 or not sampling, "untrained streams guess some of 97 tokens"


def test_what_does_not_fit_is_refused() -> None:
    target = Pair("t5").decoder
    pruned = adapter_of(target, RICH)
    for settings in (StreamSettings(placement="ride"), StreamSettings(prune=4)):
        with pytest.raises(CapabilityError, match="streams trail the passes of encoder-decoder models, unpruned and"):
            StreamDrafter(target, pruned, settings)


@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra++"])
def test_heads_change_no_token(name: str) -> None:
    """Heads read the last hidden state alone, or Hydra's prefix layer those of the text."""
    pair, method = Pair("bart"), next(each for each in methods() if each.name == name.removesuffix("++"))
    assert method.trained is not None
    config = method.trained.training.recipe(None, {"num_heads": 2}).config
    config = replace(config, prefix=True) if name == "hydra++" else config
    with torch.random.fork_rng(devices=[]):
        module = method.trained.make(pair.decoder.config, config, None)
    randomise(module, seed=3, scale=0.2)
    drafter = make_drafter(name.removesuffix("++"), pair.decoder, module.eval().requires_grad_(False))
    for sampling in ({}, {"temperature": 1.5}):
        plain, _ = emitted(pair, NoDrafter(), **sampling)
        drafted, accepted = emitted(pair, drafter, **sampling)
        assert drafted == plain
        assert accepted > 0 or not sampling


@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_training_from_texts_to_a_drafter(tmp_path: Path) -> None:
    """Completions of sources, with which a run's kept states are those of a pass; the adapter drafts, losslessly."""
    folder = save_pair("t5", tmp_path / "t5", d_kv=32)
    target = load_target(str(folder), dtype="float32")
    prompts = [EncodedPrompt(n, "toy", tuple(Pair.source_of("t5", 2 + n % 5, seed=n).tokens)) for n in range(12)]
    write_answers(target, prompts, tmp_path / "answers.jsonl", rows=3, max_new_tokens=12)
    changes: dict[str, Any] = {"num_streams": 2, "stream_layers": 2, "adapter_rank": 4, "attention_rank": 4}
    changes |= {"conditioning_rank": 32, "epochs": 2.0, "keep_states": "exact", "held_out": 2, "batch_tokens": 40}
    method = trainable("streams")
    recipe = method.trained.training.recipe("small", changes)
    examples = read_data(target, recipe, answers=tmp_path / "answers.jsonl")
    assert {tuple(each.encoded.tokens) for each in examples} == {each.ids for each in prompts}
    assert {each.prompt_ids for each in examples} == {(0,)}
    assert len({each.question for each in examples}) == len(prompts)
    record = train_adapter(target, method, recipe, examples, tmp_path / "adapter")
    assert record["training"]["examples"] == 10
    model = load(str(folder), dtype="float32", adapter=tmp_path / "adapter")
    options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "rows": 2}
    sources = [list(each.ids) for each in prompts[:5]]
    drafted = model.generate(sources, drafter="streams", **options)
    assert [each.token_ids for each in drafted] == [
        each.token_ids for each in model.generate(sources, drafter="none", **options)
    ]
    assert sum(each.stats.draft_nodes for each in drafted) > 0
    assert str(model.spec) == "streams:tree=auto,copy=yes+prompt_lookup:tokens=auto"


def test_kept_states_are_those_of_a_pass(tmp_path: Path) -> None:
    pair = Pair("bart")
    examples = [
        Example((pair.start,), tuple(pair.text(3 + n, seed=7)[1:]), encoded=pair.source(2 + 3 * n, seed=n))
        for n in range(3)
    ]
    examples.append(replace(examples[0], encoded=pair.source(4, seed=9)))  # the same tokens about another source
    run = frozen_target(pair.decoder, None)
    for _ in range(2):  # computed and written, then read by a later run
        kept = KeptStates(tmp_path, pair.decoder, examples, identity="toy", form="exact").keeping(run)
        for batch in (Batch.of(examples[1:]), Batch.of(examples[:1])):
            states, wanted = (each(batch, taps=(1,), keys_from=1) for each in (kept, run))
            for ours, theirs in zip(states.encoded, wanted.encoded, strict=True):
                assert torch.equal(ours, theirs)
            for (keys, _), (others, _) in zip(states.keys_values, wanted.keys_values, strict=True):
                for row, length in enumerate(batch.lengths_B.tolist()):
                    torch.testing.assert_close(keys[row, :, :length], others[row, :, :length])


def test_what_is_not_trained_is_refused(tmp_path: Path) -> None:
    target = load_target(str(save_pair("t5", tmp_path / "t5")), dtype="float32")
    (tmp_path / "text.txt").write_text("w5 w6 w7 w8")
    recipe = trainable("streams").trained.training.recipe("small", {})
    with pytest.raises(CapabilityError, match=r"training on plain text \(--text\) is for decoder-only models"):
        read_data(target, recipe, text=tmp_path / "text.txt")
    example = Example((0,), (5, 6, 7), encoded=Source([8, 9]))
    for name in ("paper-lossless", "paper-shared"):
        paper = trainable("streams").trained.training.recipe(name, {"stream_layers": 2})
        with pytest.raises(
            CapabilityError, match="streams of encoder-decoder models keep the frozen target's MLP; use"
        ):
            train_adapter(target, trainable("streams"), paper, [example] * 2, tmp_path / name)
    with pytest.raises(CapabilityError, match="eagle does not draft for encoder-decoder models such as "):
        train_adapter(target, trainable("eagle"), recipe, [], tmp_path / "adapter")
