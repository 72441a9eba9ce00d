"""ACL sections 2.2 and 2.3: the cost of a step whose streams ride in the pass, against passes over as many rows.

    n drafted nodes, m of them kept by pruning, gamma streams each, in the top N_s of N layers

    rows            n in the layers below, r = m (1 + gamma) in the top layers
    expected pass = (1 - N_s / N) body(n) + N_s / N body(r) + head(m) + early exit

``body(R)`` is a pass over R rows through all layers without the head. Early exit is the head over the nodes that have
children, if any are pruned.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anabranch.bench.shapes import Shape, measure_decoder
from anabranch.drafting.grow import product_size
from anabranch.methods import make_drafter
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.entry import TRAINED
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.inputs import Inputs
from studies.base import Result, Setup, Study, Table, rounded, spread

__all__ = ["LARGER", "SHAPES", "STUDY", "Tree", "expected"]

CONTEXT = 512
WIDTHS = (1, 8, 16, 32, 48)  # plain passes, besides those with as many rows as the trees have
MOST = 200  # rows in the top layers: larger trees are left out
WORDS = 8192  # draft vocabulary of adapters that are made here, that of trained ones
PAPER = StreamConfig()
FORMS = {
    "adapters of rank 8 for the MLP": PAPER,
    "deltas of rank 32": replace(PAPER, stream_mlp="mlp+adapter", adapter_rank=0, attention_rank=32, mlp_rank=32),
    "embeddings alone": replace(PAPER, stream_mlp="mlp+adapter", adapter_rank=0),
}


class Tree(NamedTuple):
    """A product tree, of which pruning keeps ``prune`` nodes; 0: all."""

    k: int
    depth: int
    prune: int = 0

    @property
    def nodes(self) -> int:
        """Drafted nodes, root included."""
        return product_size((self.k,), self.depth)

    @property
    def kept(self) -> int:
        """Nodes that pruning keeps."""
        return self.prune or self.nodes

    @property
    def scored(self) -> int:
        """Nodes that early exit scores: those with children."""
        return product_size((self.k,), self.depth - 1) if self.prune else 0

    def rows(self, streams: int) -> int:
        """Rows in the top layers."""
        return self.kept * (1 + streams)

    @property
    def spec(self) -> str:
        """The drafter."""
        return f"streams:tree=product,k={self.k},depth={self.depth},prune={self.prune},placement=ride"

    def __str__(self) -> str:
        kept = f", {self.prune} of {self.nodes} nodes" if self.prune else f", {self.nodes} nodes"
        return f"k = {self.k}, depth {self.depth}{kept}"


def _trees() -> list[Tree]:
    """The paper's tree, then the others."""
    trees = [Tree(k, depth, prune) for k in (1, 2, 3) for depth in (2, 3, 4) for prune in (0, 8, 16, 32)]
    fitting = [tree for tree in trees if tree.prune < tree.nodes and tree.rows(PAPER.num_streams) <= MOST]
    return sorted(fitting, key=Tree(3, 4, 32).__ne__)


SHAPES = _trees()


def expected(tree: Tree, streams: int, share: float, passes: Mapping[int, float], heads: Mapping[int, float]) -> float:
    """Milliseconds of a pass by those of plain passes and of the head, by rows; ``share`` of layers with streams."""
    rows = tree.rows(streams)
    below, above = (passes[count] - heads[count] for count in (tree.nodes, rows))
    return (1 - share) * below + share * above + heads[tree.kept] + heads.get(tree.scored, 0.0)


def _needed(trees: Sequence[Tree], streams: int) -> tuple[list[int], list[int]]:
    """The rows of the plain passes, and those of the head, that ``expected`` reads."""
    passes = {count for tree in trees for count in (tree.nodes, tree.rows(streams))}
    heads = passes | {count for tree in trees for count in (tree.kept, tree.scored) if count}
    return sorted({*WIDTHS, *passes}), sorted(heads)


def _adapters(setup: Setup, target: Any) -> dict[str, StreamAdapter]:
    """Those given with ``--adapter``; without any, one of random weights per form."""
    if setup.adapters:
        return {label: TRAINED.require(each.module, "streams") for label, each in setup.labelled(target).items()}
    decoder, made = target.decoder, {}
    for label, config in FORMS.items():
        module = TRAINED.make(decoder.config, config, torch.arange(min(WORDS, decoder.config.vocab_size)))
        made[label] = module.to(decoder.dtype).eval().requires_grad_(False)
    return made


def _heads(decoder: Decoder, counts: Sequence[int], rounds: int) -> dict[int, float]:
    """Median milliseconds of the head's greedy tokens, by rows, in turns."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(decoder.config.vocab_size, (1, max(counts)), generator=generator)
    cache = Cache(decoder.config, rows=1, capacity=max(counts), dtype=decoder.dtype, device=decoder.device)
    cache.add_row()
    times: dict[int, list[float]] = {count: [] for count in counts}
    with decoder.inference():
        states = decoder(Inputs.of_chains(tokens.numpy()), cache, need="hidden").hidden_MD
        for counted in range(rounds + 1):
            for count in counts:
                began = time.perf_counter()
                decoder.choose(states[:count])
                if counted:
                    times[count].append(1e3 * (time.perf_counter() - began))
    return {count: statistics.median(values) for count, values in times.items()}


def _measure(setup: Setup) -> dict[str, Any]:
    target = setup.target()
    decoder = target.decoder
    return {
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "context": CONTEXT,
        "rounds": setup.rounds,
        "layers": decoder.config.num_layers,
        "adapters": [
            setup.part(label, partial(_of_adapter, setup, decoder, label, adapter))
            for label, adapter in _adapters(setup, target).items()
        ],
    }


def _of_adapter(setup: Setup, decoder: Decoder, label: str, adapter: StreamAdapter) -> dict[str, Any]:
    """The plain passes, the heads and the riding steps of one adapter, which alternate."""
    setup.report(label)
    shape, layers = adapter.config, decoder.config.num_layers
    trees = [tree for tree in SHAPES if tree.depth <= shape.num_streams and (shape.pruning_rank or not tree.prune)]
    trees = trees[: setup.limit]
    widths, counts = _needed(trees, shape.num_streams)
    timed = measure_decoder(
        decoder,
        Path(setup.model).name,
        weights="auto",
        drafters={str(tree): make_drafter(tree.spec, decoder, adapter) for tree in trees},
        widths=widths,
        contexts=(CONTEXT,),
        rounds=setup.rounds,
    )
    heads = _heads(decoder, counts, setup.rounds)
    passes = {width: _times(timed, f"verify {width}") for width in widths}
    medians = {width: each["pass_ms"][1] for width, each in passes.items()}
    share = shape.num_stream_layers / layers
    return {
        "label": label,
        "streams": shape.num_streams,
        "stream_layers": shape.num_stream_layers,
        "parameters": adapter.num_parameters(),
        "machine": timed.machine.to_dict(),
        "plain": _times(timed, "plain"),
        "passes": {str(width): each for width, each in passes.items()},
        "head_ms": {str(count): round(ms, 4) for count, ms in heads.items()},
        "steps": [
            {
                "tree": str(tree),
                "spec": tree.spec,
                "nodes": tree.nodes,
                "kept": tree.kept,
                "rows": tree.rows(shape.num_streams),
                **_times(timed, str(tree)),
                "rows_ms": medians[tree.rows(shape.num_streams)],
                "expected_ms": round(expected(tree, shape.num_streams, share, medians, heads), 4),
            }
            for tree in trees
        ],
    }


def _times(timed: Shape, kind: str) -> dict[str, Any]:
    """Quartiles of the step and of its pass, and of the step over the plain one."""
    found = timed.find(1, CONTEXT, kind)
    assert found is not None, f"{kind}: {timed.left_out}"
    return {"step_ms": found.ms, "pass_ms": found.pass_ms, "over_plain": found.over_plain}


def _over(step: Mapping[str, Any], base: str, part: str = "pass_ms") -> list[float]:
    """Quartiles of a step's ``part`` over the milliseconds ``base``."""
    return rounded([value / step[base] for value in step[part]])


def _ours(result: Result) -> str:
    parts = []
    for each in result["adapters"]:
        step = each["steps"][0]
        within = sum(_over(one, "expected_ms")[1] <= 1.1 for one in each["steps"])
        parts.append(
            f"{each['label']}, {step['tree']}: {step['over_plain'][1]:.2f} plain steps, "
            f"{_over(step, 'expected_ms')[1]:.2f} of what its rows cost; at most 1.1 in {within} of "
            f"{len(each['steps'])} trees"
        )
    return "; ".join(parts)


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for each in result["adapters"]:
        rows += [
            [
                each["label"],
                step["tree"],
                step["rows"],
                spread(step["step_ms"]),
                spread(step["over_plain"]),
                spread(_over(step, "rows_ms")),
                spread(_over(step, "expected_ms")),
                spread(_over(step, "expected_ms", "step_ms")),
            ]
            for step in each["steps"]
        ]
    return (
        "adapter",
        "tree",
        "rows in the top layers",
        "step, ms (quartiles)",
        "over a plain step",
        "its pass, over one with as many rows in all layers",
        "its pass, over what its rows cost",
        "the step, over what its rows cost",
    ), rows


COMMAND = (
    "python research/study.py {name} --model qwen2.5-coder-{size}-instruct-q4_k_m.gguf --out "
    "benchmarks/study-{name}-DATE.json"
)
STUDY = Study(
    name="riding",
    papers="ACL sections 2.2 and 2.3",
    title="Riding streams by the rows of their pass",
    measures=f"Steps of Qwen2.5-Coder-0.5B over product trees whose {PAPER.num_streams} streams a node ride through "
    f"the top {PAPER.num_stream_layers} layers, unpruned or pruned before these layers, in turns with plain passes, "
    f"with {CONTEXT} tokens of context. The last two columns compare the pass, and the step with its draft, with what "
    "the rows cost in plain passes: the drafted nodes in the layers below, the kept nodes and their streams in the top "
    "layers, and the head over the kept nodes and, for pruning, over those with children. Stream rows with an adapter "
    "for the MLP save the MLP. Adapters have random weights, whose steps take as long as those of trained ones.",
    paper="streams ride in the pass that verifies, where memory limits and arithmetic is idle; 32 nodes are kept",
    differs="two cores, on which rows cost arithmetic; the main rows do not attend to their streams",
    ours=_ours,
    table=_table,
    measure=_measure,
    limit=len(SHAPES),
    command=COMMAND.format(name="riding", size="0.5b"),
)
LARGER = replace(
    STUDY,
    name="riding_larger",
    title="The same on a target of 1.5 billion parameters",
    measures="The same of Qwen2.5-Coder-1.5B.",
    command=COMMAND.format(name="riding_larger", size="1.5b"),
)
