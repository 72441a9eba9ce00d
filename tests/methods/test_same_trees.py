"""Every method drafts the trees of ``same_trees.json``: toy targets, fixed seeds, all kinds of trees, some budgets.

A change that is meant to change drafts writes the file anew: ``PYTHONPATH=src:tests python
tests/methods/test_same_trees.py``. The nodes have to be the same, in any order, and their log probabilities nearly.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.decoding.engine import Request
from anabranch.methods import Drafter, make_drafter
from anabranch.methods.draft_model.module import DraftConfig, DraftModule
from anabranch.methods.eagle.module import EagleConfig, EagleModule
from anabranch.methods.heads.module import start_from_target
from anabranch.methods.hydra.module import HydraConfig, HydraModule
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule
from anabranch.methods.ngram.entry import NGramDrafter, NGramModel, NGramSettings
from anabranch.methods.rest.entry import Datastore, RestDrafter, RestSettings
from anabranch.methods.space.module import MaskConfig, MaskModule
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.decoder import Decoder
from anabranch.model.pack import pack_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree
from small import RICH, WIDE, decode, prompt, randomise, small, small_adapter
from toy_tables import opened, write

FIXTURE = Path(__file__).with_name("same_trees.json")
WORDS = torch.tensor([0, 3, 4, 5, 8, 11, 12, 13, 17])
TEXT = [3, 4, 5, 6, 3, 4, 7, 8, 3, 4, 5, 9, 3, 4]
NEW, KEPT = 9, 3  # tokens of an answer, and steps of it whose trees are compared
PARENT = StreamConfig(num_streams=4, num_stream_layers=2, conditioning="parent", conditioning_rank=5)
WIDE_STREAMS = StreamConfig(**{**RICH.to_dict(), "conditioning_rank": 32, "adapter_rank": 32, "pruning_rank": 0})
BUDGETS = (None, 6)  # nodes that a draft is asked for at most; None: those of its settings


@dataclass(frozen=True)
class Requested:
    """Sampling and rules of two requests."""

    sampling: SamplingParams
    rule: str = "match"


GREEDY = Requested(SamplingParams())
WARM = Requested(SamplingParams(temperature=0.9, seed=5))
CUT = Requested(SamplingParams(temperature=0.7, top_k=6, seed=2))
REJECTED = Requested(SamplingParams(temperature=0.9, seed=5), "rejection")


@cache
def packed() -> Decoder:
    """A target in float32 on the native kernels."""
    target = build_decoder(WIDE, device="cpu")
    randomise(target, seed=1)
    assert pack_decoder(target)
    return target


def random_module(module: Any, scale: float = 0.1) -> Any:
    randomise(module, 2, scale=scale)
    return module.eval().requires_grad_(False)


def heads(kind: type[Any], config: Any, target: Decoder, vocabulary: torch.Tensor | None = WORDS) -> Any:
    """Heads with random weights around those that pass the target's state on."""
    torch.manual_seed(0)
    module = kind(target.config, config, vocabulary)
    start_from_target(target, module)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return module.eval().requires_grad_(False)


def masks(target: Decoder) -> MaskModule:
    module: MaskModule = random_module(MaskModule(target.config, MaskConfig(3)), 0.3)
    module.scale.fill_(0.7)
    return module


def eagle(target: Decoder, config: EagleConfig) -> EagleModule:
    torch.manual_seed(0)
    module = EagleModule(target.config, config, WORDS)
    randomise(module.block, seed=5, scale=0.05)
    return module.eval().requires_grad_(False)


MODULES: dict[str, Callable[[Decoder], Any]] = {
    "none": lambda target: None,
    "rich": lambda target: small_adapter(target, RICH),
    "parent": lambda target: small_adapter(target, PARENT, WORDS),
    "wide": lambda target: small_adapter(target, WIDE_STREAMS),
    "masks": masks,
    "medusa": lambda target: heads(MedusaModule, MedusaConfig(num_heads=3), target),
    "medusa own": lambda target: heads(MedusaModule, MedusaConfig(num_heads=3, head="own"), target),
    "hydra": lambda target: heads(HydraModule, HydraConfig(num_heads=3), target),
    "hydra own": lambda target: heads(HydraModule, HydraConfig(num_heads=3, head="own"), target),
    "hydra prefix": lambda target: heads(HydraModule, HydraConfig(num_heads=3, num_layers=2, prefix=True), target),
    "eagle": lambda target: eagle(target, EagleConfig()),
    "eagle taps": lambda target: eagle(target, EagleConfig(taps="1/2")),
    "draft": lambda target: random_module(
        DraftModule(target.config, DraftConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24)), 0.4
    ),
}
# module and specification, and the requests of each
SPECS: list[tuple[str, str, tuple[Requested, ...]]] = [
    ("rich", "streams", (GREEDY, WARM)),
    ("rich", "streams:tree=4", (GREEDY,)),
    ("parent", "streams:nodes=20,k=5,frontier=2", (GREEDY, WARM)),
    ("parent", "streams:threshold=0.05", (GREEDY,)),
    ("rich", "streams:condition=no,depth=2", (GREEDY,)),
    ("rich", "streams:tree=chain", (GREEDY, CUT, REJECTED)),
    ("rich", "streams:tree=product,k=2", (GREEDY, REJECTED)),
    ("rich", "streams:tree=12,prune=5", (GREEDY,)),
    ("parent", "streams:placement=ride", (GREEDY, WARM)),
    ("masks", "space", (GREEDY, WARM)),
    ("masks", "space:tree=chain", (GREEDY, REJECTED)),
    ("masks", "space:tree=product", (GREEDY, REJECTED)),
    ("medusa", "medusa", (GREEDY, WARM)),
    ("medusa", "medusa2:tree=chain", (GREEDY,)),
    ("medusa", "medusa:tree=sparse,nodes=12", (GREEDY, WARM)),
    ("medusa", "medusa:tree=product,k=2", (GREEDY,)),
    ("medusa own", "medusa:nodes=9,k=3", (GREEDY, WARM)),
    ("hydra", "hydra", (GREEDY, WARM)),
    ("hydra", "hydra:tree=chain", (GREEDY,)),
    ("hydra own", "hydra:tree=product,k=2", (GREEDY, WARM)),
    ("hydra prefix", "hydra:nodes=9,k=4", (GREEDY, WARM)),
    ("eagle", "eagle", (GREEDY, WARM)),
    ("eagle", "eagle:tree=static,threshold=0.001", (GREEDY, WARM)),
    ("eagle", "eagle:tree=chain", (GREEDY, REJECTED)),
    ("eagle taps", "eagle:nodes=9,k=3,depth=4", (GREEDY, CUT)),
    ("draft", "draft_model", (GREEDY, WARM)),
    ("draft", "draft_model:tree=chain,threshold=0.05", (GREEDY, REJECTED)),
    ("draft", "draft_model:tree=iid,tokens=3,k=2/1", (GREEDY, REJECTED)),
    ("draft", "draft_model:tree=without,tokens=3", (WARM, REJECTED)),
    ("draft", "staged:nodes=9,inner=prompt_lookup", (GREEDY,)),
    ("draft", "staged:tree=chain,inner=suffix:nodes=4", (GREEDY, REJECTED)),
    ("none", "prompt_lookup", (GREEDY, WARM)),
    ("none", "prompt_lookup:matches=3,ngram=2", (GREEDY,)),
    ("none", "suffix", (GREEDY,)),
    ("none", "suffix:nodes=5,depth=3,threshold=0.1", (GREEDY,)),
    ("none", "lookahead:window=3,ngram=3,guesses=2", (GREEDY,)),
    ("rich", "streams+prompt_lookup", (GREEDY,)),
]
NATIVE: list[tuple[str, str, tuple[Requested, ...]]] = [
    ("wide", "streams", (GREEDY, WARM)),
    ("wide", "streams:tree=8,copy=yes", (GREEDY,)),
    ("wide", "streams:tree=chain", (GREEDY, CUT)),
    ("wide", "streams:nodes=20,k=5,frontier=2,threshold=0.01", (GREEDY,)),
    ("masks", "space:tree=8", (GREEDY, WARM)),
    ("eagle", "eagle:nodes=9", (GREEDY,)),
    ("medusa", "medusa:nodes=9", (GREEDY,)),
    ("hydra", "hydra:nodes=9", (GREEDY,)),
]
TEXTS = [[3, 4, 5, 6, 7, 3, 4, 5, 9, 3, 4, 8], [5, 6, 3, 4, 5, 5, 6, 7], [9, 3, 4, 9, 3, 5]]
TABLES: dict[str, tuple[Callable[[Path], Drafter], tuple[Requested, ...]]] = {
    "ngram": (
        lambda folder: NGramDrafter(NGramModel(opened("ngram", folder)), NGramSettings(nodes=10)),
        (GREEDY, WARM),
    ),
    "ngram:tree=chain": (
        lambda folder: NGramDrafter(NGramModel(opened("ngram", folder), 2), NGramSettings("chain", 6)),
        (GREEDY, REJECTED),
    ),
    "rest": (
        lambda folder: RestDrafter(Datastore(opened("rest", folder)), RestSettings(nodes=10, depth=5)),
        (GREEDY, WARM),
    ),
}


def record(tree: DraftTree) -> list[Any]:
    """A tree as JSON values: tokens, parents, sources with repeats counted, log probabilities, and q's first tokens."""
    sources: list[list[Any]] = []
    for source in tree.sources:
        if sources and sources[-1][0] == source:
            sources[-1][1] += 1
        else:
            sources.append([source, 1])
    logs = None if tree.log_probs is None else [round(x, 3) for x in tree.log_probs.tolist()]
    probs = None if tree.draft_probs is None else [round(x, 3) for x in tree.draft_probs[:, :4].flatten().tolist()]
    return [tree.tokens.tolist(), tree.parents.tolist(), sources, logs, probs]


def drafted(target: Decoder, drafter: Drafter, asked: Requested, budget: int | None) -> list[list[Any]]:
    """The trees of the first steps of two texts that are decoded together."""
    if budget is not None:
        whole = drafter.draft
        drafter.draft = lambda rows, nodes: whole(rows, min(nodes, budget))  # type: ignore[method-assign]
    requests = [
        Request(ids, NEW, asked.sampling, rule=asked.rule)  # type: ignore[arg-type]
        for ids in (TEXT, prompt(8, 3))
    ]
    _, steps = decode(target, requests, drafter, rows=2)
    return [record(step.tree) for row in steps for step in row[:KEPT]]


def cases() -> Iterator[tuple[str, Callable[[], list[list[Any]]]]]:
    """Each case of the file, with the function that drafts its trees."""
    for where, specs in (("", SPECS), ("native ", NATIVE)):
        for module, spec, requested in specs:
            for asked in requested:
                for budget in BUDGETS if asked.rule == "match" else (None,):

                    def made(
                        where: str = where,
                        module: str = module,
                        spec: str = spec,
                        asked: Requested = asked,
                        budget: int | None = budget,
                    ) -> list[list[Any]]:
                        target = packed() if where else small()
                        return drafted(target, make_drafter(spec, target, MODULES[module](target)), asked, budget)

                    kind = asked.rule if asked.rule == "rejection" else asked.sampling.temperature
                    yield f"{where}{module} {spec} {kind} {budget or ''}".strip(), made
    for spec, (build, requested) in TABLES.items():
        for asked in requested:

            def looked_up(
                spec: str = spec, build: Callable[[Path], Drafter] = build, asked: Requested = asked
            ) -> list[list[Any]]:
                with tempfile.TemporaryDirectory() as home:
                    write(spec.partition(":")[0], TEXTS, Path(home) / "tables")
                    return drafted(small(), build(Path(home) / "tables"), asked, None)

            yield f"{spec} {asked.rule} {asked.sampling.temperature}", looked_up


CASES = dict(cases())


@cache
def wanted() -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = json.loads(FIXTURE.read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_trees_are_those_of_the_file(name: str) -> None:
    if name.startswith("native") and native.library() is None:
        pytest.skip("there are no native kernels here")
    trees = CASES[name]()
    assert len(trees) == len(wanted()[name])
    for tree, expected in zip(trees, wanted()[name], strict=True):
        if expected[4] is None:
            nodes, others = by_path(tree), by_path(expected)
            assert {path: source for path, (source, _) in nodes.items()} == {p: s for p, (s, _) in others.items()}
            if expected[3] is not None:
                for path, (_, log_prob) in nodes.items():
                    assert log_prob == pytest.approx(others[path][1], abs=3e-3)
        else:  # the order of siblings counts, and rows of q after the last parent do not
            assert tree[:3] == expected[:3]
            count = 4 * (1 + max(tree[1]))
            assert tree[4][:count] == pytest.approx(expected[4][:count], abs=3e-3)


def by_path(tree: list[Any]) -> dict[tuple[int, ...], tuple[str, float]]:
    """Source and log probability of each node by the tokens up to it; a tree's nodes may stand in any order."""
    tokens, parents, sources, log_probs, _ = tree
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    labels = [source for source, count in sources for _ in range(count)]
    assert len(set(paths)) == len(paths), "siblings have different tokens"
    return dict(zip(paths, zip(labels, log_probs or [0.0] * len(paths), strict=True), strict=True))


def test_the_file_has_no_other_cases() -> None:
    assert set(wanted()) == set(CASES)


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    lines = [f" {json.dumps(name)}: {json.dumps(made(), separators=(',', ':'))}" for name, made in CASES.items()]
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
