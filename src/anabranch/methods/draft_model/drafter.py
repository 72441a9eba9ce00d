"""A draft model as a drafter (Leviathan et al. 2023).

n nodes of a pass, V vocabulary of the target, W words that target and draft model have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from anabranch.drafting.autoregressive import AutoregressiveDrafter
from anabranch.drafting.drafter import Call, Row
from anabranch.drafting.draws import CONFIDENCE
from anabranch.drafting.grow import product_size
from anabranch.drafting.kept import Family
from anabranch.drafting.reader import Continuations, Reader
from anabranch.drafting.settings import MOST_NODES, TreeSettings
from anabranch.errors import CapabilityError, InputError
from anabranch.methods.draft_model.load import check_sides, identity_of
from anabranch.model.cache import Cache
from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Memory, Source
from anabranch.model.inputs import Inputs
from anabranch.model.pack import weight_bytes
from anabranch.model.passes import PassResult
from anabranch.model.quantize import check_quantization
from anabranch.sampling import SamplingParams, gumbels, position_keys, process_logits, target_probs
from anabranch.verify import Rule

__all__ = ["DraftModelDrafter", "DraftModelSettings", "DraftReader"]


class DraftReader(Reader):
    """A draft model and its KV cache; it answers with the logits [n, V] over its own vocabulary."""

    of_target = False

    def __init__(self, model: Decoder) -> None:
        super().__init__(model.config.max_positions)
        self.model = model
        self._call = Call("draft", model.config.num_layers, model.config.num_layers, weight_bytes(model))

    @property
    def call(self) -> Call:
        """All layers of the draft model, and its head."""
        return self._call

    @property
    def persists(self) -> bool:
        """Graphs are captured over a cache, so it is kept where they are."""
        return self.model.backend.capture is not None

    def _new_cache(self, rows: int, capacity: int) -> Cache:
        return self.model.new_cache(rows, capacity)

    def _memory(self, row: Row) -> Memory | None:
        if self.model.encoder is None or row.source is None:
            return None
        with self.model.decoding():
            return self.model.encode(row.source)

    def _varies(self, tokens: Sequence[int]) -> bool:
        """Return whether keys depend on the length of the text, or on a source."""
        return bool(self.model.rope().key(len(tokens))) or self.model.encoder is not None

    def _family(self, tokens: Sequence[int], family: Family) -> Family | None:
        identity = identity_of(self.model)  # the model reads tokens alone, whatever LoRA the target has
        return None if identity is None or self._varies(tokens) else Family(None, 0, identity)

    def known(self, tokens: Sequence[int], lora: str | None = None) -> tuple[int, int]:
        """See ``Reader``; none where keys and values are not those of the tokens alone."""
        return (0, 0) if self._varies(tokens) else super().known(tokens, lora)

    def _known(self, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids [n]; 0 stands for those that the draft model's vocabulary lacks."""
        ids = np.asarray(tokens, np.int64)
        return np.where(ids < self.model.config.vocab_size, ids, 0)

    def _read(self, row: Row, tokens: Sequence[int]) -> None:
        assert self.cache is not None
        slot = self._places[row].slot
        with self.model.decoding():
            inputs = Inputs.of_prompt(self._known(tokens).tolist())
            self.model(inputs, self.cache, slots=slice(slot, slot + 1), need="keys")

    def _run(self, inputs: Inputs, at: Sequence[tuple[int, int]]) -> Tensor:
        assert self.cache is not None
        inputs = Inputs(self._known(inputs.tokens_M), inputs.parents_M, inputs.counts_B)
        with self.model.decoding():
            result = self.model(inputs, self.cache, need="hidden")
            places = torch.tensor([result.starts_B[slot] + place for slot, place in at], device=self.model.device)
            logits: Tensor = self.model.logits(result.hidden_MD[places])
        return logits


LONGEST = 10  # tokens of a draft whose length the load decides
MOST_TOKENS = 256


@dataclass(frozen=True)
class DraftModelSettings(TreeSettings):
    """Settings of ``draft_model:...``.

    model      folder, .gguf file or hub id of the draft model; empty: the adapter that was trained for the target, or
               without one, the draft model that comes with the package for the target's vocabulary, if there is one
    tree       best, chain, auto (best, and the load decides how many nodes), a number: its nodes; iid or without: every
               node has k children, which under *rejection* are sampled independently or without replacement, and under
               *matching* are the best
    tokens     depth at most, or auto: up to 10, as the load decides
    nodes      node budget of a best-first tree, root included; 0: 16, or with tree=auto 24
    k          children of a node, or of nodes by depth: 3/2/1; empty: 2, in a best-first tree 16
    threshold  joint probability below which a node is not drafted; a chain ends there
    quantize   auto (as stored), none (dequantised), int8 or int4 weights of the draft model
    """

    paths = ("model",)
    trees = ("best", "chain", "iid", "without", "auto")
    tokens: str = "5"
    k: str = ""
    threshold: float = 0.0
    model: str = ""
    quantize: str = "auto"

    def __post_init__(self) -> None:
        self.check_count("tokens", 1, MOST_TOKENS)
        if self.k and not all(width.isdigit() for width in self.k.split("/")):
            raise InputError(f"k must be a whole number, or several by depth as in 3/2/1, got {self.k!r}")
        super().__post_init__()
        if min(self.widths) < 1:
            raise InputError(f"k must be at least 1, got {self.k}")
        if self.kind in ("iid", "without") and product_size(self.widths, self.deepest) > MOST_NODES:
            raise InputError(
                f"{self.tokens} tokens with {'/'.join(map(str, self.widths))} children a node make more than "
                f"{MOST_NODES:,} nodes; lower k or tokens, or use tree=best with a node budget"
            )
        check_quantization(self.quantize)

    @property
    def adaptive(self) -> bool:
        """Return whether ``tree=auto`` or ``tokens=auto``."""
        return "auto" in (self.tree, self.tokens)

    @property
    def deepest(self) -> int:
        """Depth of a tree at most."""
        return LONGEST if self.tokens == "auto" else int(self.tokens)

    @property
    def widths(self) -> tuple[int, ...]:
        """Children of a node at most by its depth; a best-first tree has one width."""
        if self.kind == "chain":
            return (1,)
        widths = tuple(map(int, self.k.split("/"))) if self.k else (16 if self.kind == "best" else 2,)
        return widths[:1] if self.kind == "best" else widths


class DraftModelDrafter(AutoregressiveDrafter[DraftReader]):
    """Drafts from a smaller model with the target's vocabulary.

    model  the draft model: any decoder that reads the target's token ids
    words  token ids that both have
    """

    name = "draft_model"
    rules = ("match", "rejection")
    sampled_trees = "tree=chain, tree=iid or tree=without"

    def __init__(self, target: Decoder, model: Decoder, settings: DraftModelSettings | None = None) -> None:
        settings = settings or DraftModelSettings()
        if model.config.recurrent is not None:
            raise CapabilityError(
                f"a {model.config.family} model cannot be a draft model: its recurrent state cannot go back to where "
                "the target left its draft; use a draft model without recurrent layers"
            )
        check_sides(target, model)
        super().__init__(target, DraftReader(model), settings, settings.deepest)
        if self.depth >= model.config.max_positions:
            raise CapabilityError(
                f"the draft model reads {model.config.max_positions} tokens at most, too few to draft "
                f"{self.depth}; lower tokens"
            )
        self.words = min(target.config.vocab_size, model.config.vocab_size)

    @property
    def model(self) -> Decoder:
        """The draft model."""
        return self.reader.model

    def check(self, sampling: SamplingParams, rule: Rule, source: Source | None = None) -> None:
        """The draft model's own encoder reads the source too."""
        super().check(sampling, rule, source)
        if self.model.encoder is not None:
            try:
                self.model.encoder.check(source)
            except InputError as error:
                raise InputError(f"the draft model cannot read this source: {error}") from error

    # -- rows ------------------------------------------------------------------------------------------
    def read(self, row: Row, result: PassResult, start: int) -> None:
        """Read the same chunk of the prompt; of what the target did not have to read, as much again."""
        end = start + result.counts_B[0]
        if end < self.reader.longest:
            self.reader.read(row, end, most=2 * result.counts_B[0])

    # -- drafts ----------------------------------------------------------------------------------------
    def _tell(self, answered: Sequence[tuple[Row, Continuations, Sequence[int]]], logits_nV: Tensor) -> None:
        parts = torch.split(logits_nV[:, : self.words].float(), [len(nodes) for _, _, nodes in answered])
        matching: list[tuple[Continuations, Sequence[int], Tensor]] = []
        for (row, known, nodes), z_nW in zip(answered, parts, strict=True):
            params, histories = self._sampling(row, known, nodes)
            if row.rule == "rejection":
                q_nV = F.pad(target_probs(z_nW, params, histories), (0, self.target.config.vocab_size - self.words))
                self._know_distributions(known, nodes, q_nV)
                continue
            z_nW = process_logits(z_nW, params, histories)
            if not params.greedy:
                # the target will draw the largest of its scores plus this noise
                keys = position_keys(params.seed, [len(row.tokens) + known.depths[node] for node in nodes])
                z_nW = CONFIDENCE * (z_nW + gumbels(keys, torch.arange(self.words, device=z_nW.device)))
            matching.append((known, nodes, z_nW))
        if matching:
            self._rank(matching)

    def _rank(self, matching: Sequence[tuple[Continuations, Sequence[int], Tensor]]) -> None:
        """The best next tokens of each node, in one transfer to the host."""
        z_nW = torch.cat([z for _, _, z in matching])
        best = z_nW.log_softmax(dim=-1).topk(min(max(self.settings.widths), self.max_nodes - 1, self.words), dim=-1)
        log_probs, tokens = torch.stack((best.values.double(), best.indices.double())).cpu().tolist()
        first = 0
        for known, nodes, _ in matching:
            part = slice(first, first := first + len(nodes))
            self._know_best(known, nodes, tokens[part], log_probs[part])
