"""EAGLE: drafts are those of the head on the target's features, whatever rows did before, and the output is exact."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.errors import CapabilityError, InputError
from anabranch.methods import Row, make_drafter, parse_spec
from anabranch.methods.eagle.drafter import STATIC_TREE, EagleDrafter, EagleSettings
from anabranch.methods.eagle.module import EagleConfig, EagleModule, begin_with
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from anabranch.model.weights import build_decoder
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import CASES, LLAMA, SAMPLINGS, decode, drawn_lora, plain, prompt, randomise, request, same_tree, small
from toy_distribution import assert_pairs_from, pair_probs

SHAPES: dict[str, dict[str, Any]] = {
    "best": {"settings": EagleSettings("best", nodes=9, depth=4, k=4)},
    "chain": {"settings": EagleSettings("chain", depth=4)},
    "static": {"settings": EagleSettings("static", depth=5, k=4)},
    "cut": {"settings": EagleSettings("static", nodes=7, depth=4, k=4, threshold=0.02)},
}
TAPS = EagleConfig(taps="1/2")
WARM = SamplingParams(temperature=0.9, seed=3)


def head(target: Decoder, config: EagleConfig | None = None, words: torch.Tensor | None = None) -> EagleModule:
    """A head that passes the target's feature on, with some noise: its drafts are right now and then."""
    torch.manual_seed(0)
    module = EagleModule(target.config, config or EagleConfig(), words)
    randomise(module.block, seed=5, scale=0.05)
    return module.eval().requires_grad_(False)


def states_of(
    target: Decoder, text: Sequence[int], taps: Sequence[int] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The target's states [T, D] over a text, after the last norm and before some layers."""
    cache = Cache(target.config, rows=1, capacity=len(text), dtype=target.dtype, device=target.device)
    cache.add_row()
    with torch.inference_mode():
        found = target(Inputs.of_prompt(text), cache, taps=taps, need="hidden")
    return found.hidden_MD.clone(), [found.taps[layer].clone() for layer in taps]


class Compared(EagleDrafter):
    """Drafts each tree a second time with an empty cache, from the features of the whole text."""

    compared = 0

    def draft(self, rows: Sequence[Row], budget: int) -> list[DraftTree]:
        trees = super().draft(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            if tree.size == 1:
                continue
            fresh = EagleDrafter(self.target, self.module, self.settings)
            again = Row(row.tokens, row.prompt_length, row.sampling, row.rule, row.max_depth)
            fresh.join(again)
            hidden, taps = states_of(self.target, row.tokens[:-1], self.needs.layers)
            fresh.reader.feed((again, self.layer.features(hidden, taps)))
            (wanted,) = fresh.draft([again], budget)
            same_tree(tree, wanted)
            self.compared += 1
        return trees


# -- what is drafted -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config", [EagleConfig(), TAPS, EagleConfig(embedding_norm=False, input_norm=False, bias=True)]
)
def test_a_chain_continues_the_features_one_by_one(config: EagleConfig) -> None:
    """The reference runs the layer over the whole text and its own features at every step, without a cache."""
    target = small()
    module = head(target, config)
    drafter = EagleDrafter(target, module, EagleSettings("chain", depth=3))
    row = Row(prompt(9), 9, SamplingParams(), max_depth=20)
    drafter.join(row)
    hidden, taps = states_of(target, row.tokens[:-1], config.layers)
    features = module.features(hidden, taps)
    drafter.reader.feed((row, features))
    (tree,) = drafter.draft([row], 4)
    text, joint = list(row.tokens), 0.0
    for depth, (token, stated) in enumerate(zip(tree.tokens[1:].tolist(), tree.log_probs.tolist()[1:], strict=True)):  # type: ignore[union-attr]
        positions = torch.arange(len(text) - 1)[None]
        cos, sin = target.rope()(positions, 96)
        embeddings = target.embed(torch.tensor([text[1:]]), positions)
        out = module.unroll(embeddings, features[None], cos, sin, 1)[0][0, -1]
        law = target.logits(module.states(out)).log_softmax(-1)
        assert token == int(law.argmax())
        joint += float(law[token])
        assert stated == pytest.approx(joint, abs=1e-4)
        text.append(token)
        features = torch.cat((features, out[None]))
        assert tree.sources[depth + 1] == f"eagle {depth + 1}"
    assert tree.size == 4


def test_unrolled_steps_are_the_levels_of_a_draft() -> None:
    target = small("mistral")
    module, text = head(target), prompt(12)
    positions = torch.arange(11)[None]
    cos, sin = target.rope()(positions, 96)
    hidden, _ = states_of(target, text[:-1])
    steps = module.unroll(target.embed(torch.tensor([text[1:]]), positions), hidden[None], cos, sin, 3)
    for root in (4, 7):  # a draft whose root is there, and whose nodes are the text's next tokens
        drafter = EagleDrafter(target, module, EagleSettings("chain", depth=3))
        row = Row(text[: root + 1], 4, SamplingParams(), max_depth=9)
        drafter.join(row)
        with torch.inference_mode():
            drafter.reader.feed((row, hidden[:root]))
            (asked,) = drafter.reader.begin([row])
            node, found = 0, []
            for depth in range(3):
                found.append(drafter.reader.ask({row: [node]})[0])
                node = asked.child(node, text[root + 1 + depth])
        for depth, feature in enumerate(found):
            torch.testing.assert_close(feature, steps[depth][0, root - 1 + depth], atol=1e-4, rtol=1e-4)


def test_the_static_tree_is_the_papers() -> None:
    """As drawn in EAGLE's paper and listed in its code: the ranks of each node's children, and how many there are."""
    by_depth = [[path for path in STATIC_TREE if len(path) == depth] for depth in range(5)]
    assert [sum(STATIC_TREE[path] for path in level) for level in by_depth] == [4, 8, 8, 3, 2]
    assert all(path[-1] < STATIC_TREE[path[:-1]] for path in STATIC_TREE if path), "the parent of a node is there"


@pytest.mark.parametrize(
    ("shape", "config", "sampling"),
    [
        ("best", EagleConfig(), SamplingParams()),
        ("best", TAPS, WARM),
        ("chain", TAPS, SamplingParams()),
        ("static", EagleConfig(), WARM),
        ("cut", EagleConfig(), SamplingParams()),
    ],
)
def test_trees_do_not_depend_on_what_the_cache_went_through(
    shape: str, config: EagleConfig, sampling: SamplingParams
) -> None:
    target = small()
    drafter = Compared(target, head(target, config), **SHAPES[shape])
    asked = [request(1 + 4 * n, n, 5 + 4 * n, sampling=replace(sampling, seed=n)) for n in range(5)]
    assert decode(target, asked, drafter, rows=3)[0] == plain(target, asked)
    assert drafter.compared > 20


def test_rejection_of_chains_does_not_depend_on_what_the_cache_went_through() -> None:
    target = small()
    drafter = Compared(target, head(target), **SHAPES["chain"])
    warm = [SamplingParams(temperature=0.9, top_k=6, seed=n) for n in range(4)]
    asked = [request(4 + 3 * n, n, 9 + n, sampling=warm[n], rule="rejection") for n in range(4)]
    tokens, _ = decode(target, asked, drafter, rows=3)
    assert [len(row) for row in tokens] == [9 + n for n in range(4)]
    assert drafter.compared > 5


# -- what is emitted -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "sampled"),
    [
        *product(["llama"], SAMPLINGS),
        *(
            pytest.param(case, "warm", marks=() if case in ("gemma2", "gpt2") else pytest.mark.thorough)
            for case in sorted(CASES)
            if case != "llama"
        ),
    ],
)
def test_matching_emits_what_plain_decoding_emits(case: str, sampled: str) -> None:
    target, sampling = small(case), SAMPLINGS[sampled]
    asked = [request(1 + 4 * n, n, 12, sampling=replace(sampling, seed=n)) for n in range(4)]
    wanted = plain(target, asked)
    words = torch.tensor([0, 2, 3, 5, 7, 8, 11, 13, 17])  # rows add their own tokens
    for rows, shape, config in ((1, "best", EagleConfig()), (3, "static", TAPS)):
        drafter = EagleDrafter(target, head(target, config, words), **SHAPES[shape])
        found, steps = decode(target, asked, drafter, rows=rows)
        assert found == wanted
        assert any(step.tree.size > 1 for row in steps for step in row)


@pytest.mark.thorough
def test_rejection_keeps_the_joint_distribution_of_two_tokens() -> None:
    """The first two tokens of 1,600 samples; the head drafts from the end of the prompt on."""
    count, text = 1600, [1, 4, 2, 3]
    target = build_decoder(replace(LLAMA, vocab_size=5, num_layers=2), device="cpu")
    randomise(target, seed=3, scale=0.2)
    module = head(target)
    asked = [Request(text, 3, SamplingParams(temperature=3.0, seed=seed), rule="rejection") for seed in range(count)]
    found, steps = decode(target, asked, EagleDrafter(target, module, EagleSettings("chain", depth=2)), rows=64)
    assert_pairs_from([(one, two) for one, two, _ in found], pair_probs(target, text, temperature=3.0))
    assert 0.2 < np.mean([row[0].verdict.accepted > 0 for row in steps]) < 1.0  # drafts were judged both ways


def test_the_budget_decides_how_deep_a_tree_is() -> None:
    drafter = make_drafter("eagle:tree=auto,nodes=9,depth=4", small(), head(small()))
    assert [drafter.depth_of(budget) for budget in (2, 3, 4, 9)] == [1, 2, 3, 4]


def test_rows_leave_early_and_others_go_on() -> None:
    target = small()
    drafter = Compared(target, head(target), **SHAPES["best"])
    engine = Engine(target, drafter, rows=3, capacity=96)
    keys = [engine.add(request(5 + n, n, 30)) for n in range(3)]
    for _ in range(3):
        engine.step()
    engine.remove(keys[0])
    keys.append(engine.add(request(9, 7, 10)))
    while engine.active:
        engine.step()
    assert drafter.compared > 10
    assert not drafter.reader._places


def test_prompts_that_are_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.decoding.ticks.CHUNK", 8)
    monkeypatch.setattr("anabranch.decoding.ticks.SHARED_CHUNK", 8)
    target = small()
    drafter = Compared(target, head(target), **SHAPES["best"])
    scheduler = Scheduler(target, rows=3)
    asked, tickets = [request(count, count, 20) for count in (50, 25, 9)], []
    for each in asked:
        tickets.append(scheduler.submit(each, drafter))
        scheduler.tick()
    while scheduler.busy:
        scheduler.tick()
    assert [ticket.emitted for ticket in tickets] == plain(target, asked)
    assert drafter.compared > 10


def test_a_prompt_that_begins_like_an_earlier_text_is_read_from_where_they_differ() -> None:
    target = small()
    drafter = Compared(target, head(target), **SHAPES["best"])
    scheduler = Scheduler(target)

    def said(ids: Sequence[int], least: int, most: int) -> list[int]:
        compared = drafter.compared
        ticket = scheduler.submit(Request(ids, 12), drafter)
        while scheduler.busy:
            scheduler.tick()
        assert ticket.emitted == decode(target, [Request(ids, 12)])[0][0]
        assert least <= ticket.reused <= most
        assert drafter.compared > compared
        return [*ids, *ticket.emitted]

    text = said(prompt(24, 1), 0, 0)
    later = said([*text, *prompt(6, 8)], 23, len(text) - 1)  # what the last step emitted may be unread
    said(later[:30], 28, 28)  # the root's position is computed again
    said([*later[:20], *[t % 15 + 3 for t in later[20:26]]], 19, 19)
    said(prompt(24, 5), 0, 0)


def test_the_keys_of_a_row_with_a_lora_serve_rows_with_that_lora() -> None:
    """The layer reads the target's features, which a LoRA changes."""
    target = copy.deepcopy(small())
    target.add_lora("a", drawn_lora(target.config))
    drafter = make_drafter("eagle", target, head(target))
    assert isinstance(drafter, EagleDrafter)
    asked = replace(request(24, 1, 12), lora="a")
    (found,), _ = decode(target, [asked], drafter)
    text = [*asked.prompt_ids, *found]
    assert drafter.reader.known(text, "a")[0] > 20
    assert drafter.reader.known(text) == (0, 0)
    decode(target, [replace(asked, lora=None)], drafter)
    assert drafter.reader.known(text)[0] > 20


# -- settings, shapes, bad input -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "printed", "nodes"),
    [
        ("eagle", "eagle", 16),
        ("eagle:tree=12,k=3", "eagle:nodes=12,k=3", 12),
        ("eagle:tree=auto", "eagle:tree=auto", 24),
        ("eagle:tree=static", "eagle:tree=static", 26),
        ("eagle:tree=chain,depth=3", "eagle:tree=chain,depth=3", 4),
    ],
)
def test_specifications(text: str, printed: str, nodes: int) -> None:
    assert str(parse_spec(text)) == printed
    drafter = make_drafter(text, small(), head(small()))
    assert isinstance(drafter, EagleDrafter)
    assert drafter.max_nodes == nodes
    assert drafter.needs.prompt


def test_what_is_not_supported() -> None:
    target = small()
    with pytest.raises(CapabilityError, match="needs an adapter that was trained for this target"):
        make_drafter("eagle", target)
    drafter = make_drafter("eagle", target, head(target))
    with pytest.raises(CapabilityError, match=r"rule='rejection' is not exact; use rule='match', or tree=chain"):
        drafter.check(SamplingParams(temperature=1.0), "rejection")
    make_drafter("eagle:tree=chain", target, head(target)).check(SamplingParams(temperature=1.0), "rejection")


def test_configs_that_are_refused() -> None:
    for taps, message in (("a/b", "taps must be numbers"), ("2/1", "ascending order"), ("1/1", "different layers")):
        with pytest.raises(InputError, match=message):
            EagleConfig(taps=taps)
    with pytest.raises(InputError, match="taps has layer 3, but the target's layers end at 2"):
        EagleModule(small().config, EagleConfig(taps="0/3"))
    with pytest.raises(InputError, match="it has taps '1/2', but this training uses ''"):
        begin_with(head(small()), head(small(), TAPS))
    fresh, trained = EagleModule(small().config, EagleConfig(), torch.arange(4)), head(small())
    begin_with(fresh, trained)
    assert bool((fresh.fc.weight == trained.fc.weight).all())
    assert len(fresh.vocabulary) == 4


def test_features_that_are_no_numbers_draft_nothing() -> None:
    target = small()
    module = head(target)
    module.fc.weight.fill_(float("nan"))
    for rule, shape in (("match", "best"), ("rejection", "chain")):
        asked = [request(5, 1, 6, sampling=SamplingParams(temperature=1.0), rule=rule)]
        _, (steps,) = decode(target, asked, EagleDrafter(target, module, **SHAPES[shape]))
        assert all(step.tree.size == 1 for step in steps)
