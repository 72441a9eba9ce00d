"""Statistics count every forward pass that is run, the target's and the drafters'."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from anabranch.bench.summary import CALL_TITLES, call_cells, calls_per_token
from anabranch.cli.show import passes
from anabranch.decoding.engine import Request
from anabranch.decoding.stats import Stats
from anabranch.methods import Drafter, make_drafter
from anabranch.methods.draft_model.drafter import DraftModelDrafter, DraftModelSettings
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.methods.hydra.module import HydraConfig, HydraModule
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule
from anabranch.methods.prompt_lookup import LookupSettings, PromptLookupDrafter
from anabranch.methods.space.module import MaskConfig, MaskModule
from anabranch.methods.staged import StagedDrafter
from anabranch.model.blocks import Block
from anabranch.model.decoder import Decoder
from anabranch.model.pack import read_bytes, weight_bytes
from small import decode, small, small_adapter

TEXT = [3, 4, 5, 6, 7] * 4


def _fresh(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return module.eval().requires_grad_(False)


def _drafter(name: str, target: Decoder) -> Drafter:
    config = target.config
    if name in ("draft_model", "staged"):
        settings = DraftModelSettings("chain", tokens="4")
        if name == "staged":
            inner = PromptLookupDrafter(LookupSettings(tokens="4"))
            return StagedDrafter(target, copy.deepcopy(target), settings, inner=inner)
        return DraftModelDrafter(target, copy.deepcopy(target), settings)
    if name.startswith("eagle"):
        return make_drafter(name, target, _fresh(EagleModule(config, EagleConfig())))
    if name.startswith("hydra"):
        return make_drafter("hydra", target, _fresh(HydraModule(config, HydraConfig(prefix=name == "hydra, prefix"))))
    if name == "medusa":
        return make_drafter(name, target, _fresh(MedusaModule(config, MedusaConfig())))
    if name.startswith("space"):
        return make_drafter(name, target, _fresh(MaskModule(config, MaskConfig(3))))
    return make_drafter(name, target, small_adapter(target))


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Counts the decoder layers that run, whatever runs them."""
    found: Counter[str] = Counter()

    def hook(module: nn.Module, *_: object) -> None:
        found["layers"] += isinstance(module, Block)

    handle = register_module_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("none", {"target"}),
        ("prompt_lookup", {"target"}),
        ("lookahead", {"target"}),
        ("streams:placement=trail", {"target", "partial"}),
        ("streams:placement=trail,tree=chain+prompt_lookup", {"target", "partial"}),
        ("streams:placement=ride", {"target", "heads"}),
        ("space:placement=trail", {"target", "partial"}),
        ("draft_model", {"target", "draft"}),
        ("staged", {"target", "draft", "inner"}),
        ("eagle", {"target", "partial"}),
        ("medusa", {"target", "heads"}),
        ("hydra", {"target", "heads"}),
        ("hydra, prefix", {"target", "partial", "heads"}),
    ],
)
def test_every_layer_that_runs_is_counted(name: str, kinds: set[str]) -> None:
    target = copy.deepcopy(small())
    drafter = _drafter(name, target)
    with _counted() as ran:
        (tokens,), (steps,) = decode(target, [Request(TEXT[:1], 40)], drafter)
    stats = Stats.of(steps)
    assert tokens == decode(target, [Request(TEXT[:1], 40)])[0][0]
    assert {kind for kind, _, _ in stats.calls} == kinds
    layers = target.config.num_layers
    assert stats.calls["target", layers, layers] == stats.steps
    assert sum(count * part for (_, part, _), count in stats.calls.items()) == ran["layers"]
    assert stats.draft_calls == sum(n for (kind, part, _), n in stats.calls.items() if kind != "target" and part)


@pytest.mark.parametrize("name", ["draft_model", "streams:placement=trail"])
def test_rows_that_share_a_pass_count_it_each_and_divide_its_bytes(name: str) -> None:
    target = small()
    drafter = _drafter(name, target)
    (alone,) = decode(target, [Request(TEXT, 12)], drafter)[1]
    both = decode(target, [Request(TEXT, 12), Request(TEXT, 12)], _drafter(name, target), rows=2)[1]
    one, *two = Stats.of(alone), *map(Stats.of, both)
    for stats in two:
        assert stats.steps == one.steps
        assert stats.calls["target", 3, 3] == one.calls["target", 3, 3]
    assert Stats.merged(two).bytes_read < 1.5 * one.bytes_read
    assert Stats.merged(two).calls["target", 3, 3] == 2 * one.steps


def test_prompts_are_not_counted_and_bytes_are_those_of_weights() -> None:
    target = small()
    (steps,) = decode(target, [Request(TEXT, 9)])[1]
    stats = Stats.of(steps)
    assert stats.bytes_read == 9 * weight_bytes(target)
    drafter = _drafter("draft_model", target)
    (steps,) = decode(target, [Request(TEXT, 9)], drafter)[1]
    found = Stats.of(steps)
    assert found.calls["draft", 3, 3] == drafter.reader.passes == found.draft_calls
    assert found.bytes_read == (found.steps + found.draft_calls) * weight_bytes(target)
    trailing = small_adapter(target)
    (steps,) = decode(target, [Request(TEXT, 9)], make_drafter("streams:placement=trail", target, trailing))[1]
    found = Stats.of(steps)
    below = read_bytes((target.blocks[trailing.start :], trailing.layers, *trailing.terms))
    head = weight_bytes(target) - read_bytes((target.blocks, target.norm)) - target.norm.weight.nbytes
    assert found.bytes_read == pytest.approx(
        found.steps * weight_bytes(target) + found.draft_calls * (below + head), rel=0.01
    )


def test_statistics_survive_json_and_say_what_was_run() -> None:
    target = small()
    (steps,) = decode(target, [Request(TEXT, 12)], _drafter("staged", target))[1]
    stats = Stats.of(steps)
    assert Stats.from_dict(stats.to_dict()).calls == stats.calls
    assert Stats.from_dict(stats.to_dict()).bytes_read == round(stats.bytes_read)
    count = stats.calls["draft", 3, 3]
    assert passes(stats).startswith(f"{stats.steps} target pass")
    assert f"{count} draft model pass" in passes(stats)
    some = Stats(steps=31, calls=Counter({("target", 30, 30): 31, ("copy", 30, 30): 1, ("partial", 12, 30): 62}))
    assert passes(some) == "31 target passes, 1 pass of its 4-bit copy, 62 partial passes (12 of 30 layers)"
    assert some.draft_calls == 63


def test_tables_show_what_was_counted_and_invent_nothing() -> None:
    stats = Stats(tokens=100, steps=25, calls=Counter({("target", 3, 3): 25, ("partial", 1, 3): 50}), bytes_read=5e8)
    found = calls_per_token(stats)
    assert call_cells(found) == ["0.25", "0.50", "5.0"]
    assert len(CALL_TITLES) == 3
    assert calls_per_token(Stats(tokens=4, steps=4)) == {}
    assert call_cells({"mean_acceptance_length": 4.0}) == ["0.25", "-", "-"]
    assert call_cells({}) == ["-", "-", "-"]
