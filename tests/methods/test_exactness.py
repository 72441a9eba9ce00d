"""Every trained method emits what plain decoding emits: under any load, and merged with a method without weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_same_trees import MODULES

from anabranch.decoding.engine import Request
from anabranch.drafting.combined import CombinedDrafter
from anabranch.methods import make_drafter
from small import SAMPLINGS, decode, plain, request, small


@pytest.mark.parametrize(
    ("module", "spec"),
    [
        ("masks", "space:tree=auto,nodes=9"),
        ("medusa", "medusa:tree=auto,nodes=9,k=4"),
        ("hydra prefix", "hydra:tree=auto,nodes=9,k=4"),
        ("eagle", "eagle:tree=auto,nodes=9,depth=4"),
    ],
)
def test_the_load_decides_how_much_is_drafted(module: str, spec: str) -> None:
    target = small()
    drafter = make_drafter(spec, target, MODULES[module](target))
    assert drafter.adaptive
    asked = [request(n, n, 30) for n in range(3, 9)]
    assert decode(target, asked, drafter, rows=4)[0] == plain(target, asked)


@pytest.mark.parametrize(
    ("module", "spec", "sources"),
    [
        ("masks", "space:nodes=8", {"mask 1", "mask 2"}),
        ("medusa", "medusa:nodes=8", {"head 1", "head 2"}),
        ("hydra prefix", "hydra:nodes=8", {"head 1", "head 2"}),
        ("eagle taps", "eagle:nodes=8,depth=3", {"eagle 1", "eagle 2"}),
        ("draft", "draft_model:nodes=8,tokens=3", {"draft 1", "draft 2"}),
    ],
)
@pytest.mark.parametrize("sampling", ["greedy", "warm"])
def test_trees_are_merged_with_those_of_others(module: str, spec: str, sources: set[str], sampling: str) -> None:
    target = small()
    drafter = make_drafter(f"{spec}+prompt_lookup:tokens=3", target, MODULES[module](target))
    assert isinstance(drafter, CombinedDrafter)
    asked = [request(n, n, 20) for n in range(3, 7)]
    asked.append(Request([3, 4, 5, 6, 3, 4, 5, 6, 3], 20))
    asked = [replace(each, sampling=replace(SAMPLINGS[sampling], seed=n)) for n, each in enumerate(asked)]
    found, steps = decode(target, asked, drafter, rows=2)
    assert found == plain(target, asked)
    drafted = {source for row in steps for step in row for source in step.tree.sources}
    assert {"target", "prompt_lookup", *sources} <= drafted
