"""Drafts for vLLM: the methods that need nothing but the text, as a ``custom_class`` of its speculative decoding.

    LLM(
        model,
        speculative_config={
            "method": "custom_class",
            "model": "anabranch.integrations.vllm.Proposer",
            "num_speculative_tokens": 8,
        },
        additional_config={"anabranch_drafter": "suffix"},
    )

vLLM verifies one chain of tokens for each request, so of a draft tree the path with the most expected accepted tokens
is proposed. vLLM itself is not imported here; the interface is that of 0.32 (docs/integrations.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import CapabilityError
from anabranch.methods import AUTO, Drafter, Row, Spec, make_drafter, methods, resolve_spec
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.load import name_tokenizer
from anabranch.model.weights import build_decoder
from anabranch.sampling import SamplingParams
from anabranch.tree import DraftTree

__all__ = ["Proposer"]

OPTION = "anabranch_drafter"  # in vLLM's ``additional_config``


@dataclass(eq=False)
class _Request:
    """A request that vLLM decodes: its row, its text so far, and the chain that was last proposed."""

    row: Row
    text: NDArray[np.int32]
    proposed: DraftTree | None = None


class Proposer:
    """Proposes drafts for the requests of one vLLM worker.

    The drafter is the specification in ``additional_config["anabranch_drafter"]``, or the ``drafter`` of a subclass.
    Drafts need not be right: vLLM verifies them, so they change the speed and not the text.

    vllm_config  vLLM's VllmConfig

    Raises InputError for a specification that does not exist, CapabilityError for a method that needs the target's
    hidden states or a model of its own, and FileError for tables of another tokenizer.
    """

    drafter: str = AUTO

    def __init__(self, vllm_config: Any) -> None:
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self.num_speculative_tokens = int(speculative.num_speculative_tokens)
        self.max_model_len = int(model.max_model_len)
        options = getattr(vllm_config, "additional_config", None)
        given = options.get(OPTION, self.drafter) if isinstance(options, dict) else self.drafter
        spec = resolve_spec(given)
        _check(spec)
        self._drafter: Drafter = make_drafter(spec, _stand_in(model, spec))
        self._requests: dict[int, _Request] = {}  # by their place in vLLM's batch

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft of at most ``num_speculative_tokens`` tokens for each request, perhaps none.

        sampled_token_ids   for each request, the tokens that it gained in this step; none while its prompt is read
        num_tokens_no_spec  [B] the length of each text, with those tokens
        token_ids_cpu       [B, max_model_len] the texts
        """
        previous, self._requests = self._requests, {}
        for place, sampled in enumerate(sampled_token_ids):
            if len(sampled):
                text = np.array(token_ids_cpu[place, : int(num_tokens_no_spec[place])], np.int32)
                self._requests[place] = self._follow(previous, place, text, len(sampled))
        for request in previous.values():
            self._drafter.leave(request.row)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        drafted = {place: request for place, request in self._requests.items() if self._room(request)}
        rows = [request.row for request in drafted.values()]
        trees = self._drafter.draft(rows, self._drafter.max_nodes) if rows else []
        for (place, request), tree in zip(drafted.items(), trees, strict=True):
            request.proposed = _best_path(tree, self.num_speculative_tokens)
            drafts[place] = request.proposed.tokens[1:].tolist()
        return drafts

    def _follow(self, previous: dict[int, _Request], place: int, text: NDArray[np.int32], new: int) -> _Request:
        """The request at a place of the batch: one of the previous ones, which vLLM may have moved, or a new one."""
        known = len(text) - new
        for key in (place, *previous):
            request = previous.get(key)
            if request is not None and np.array_equal(request.text, text[:known]):
                del previous[key]
                added = text[known:].tolist()
                self._learn(request, added)
                request.row.tokens += added
                request.text = text
                return request
        request = _Request(Row(text.tolist(), known, SamplingParams()), text)
        self._drafter.join(request.row)
        return request

    def _learn(self, request: _Request, added: Sequence[int]) -> None:
        """Correct the row's probabilities by how much of its last draft was accepted."""
        tree = request.proposed
        request.proposed = None
        if tree is not None and tree.size > 1 and tree.log_probs is not None:
            accepted = min(len(added) - 1, tree.size - 1)
            request.row.acceptance.learn(tree, range(accepted + 1))

    def _room(self, request: _Request) -> bool:
        """Set the depth of a request's next draft; returns whether there is room for one."""
        left = self.max_model_len - len(request.text) - 1
        request.row.max_depth = min(self.num_speculative_tokens, left)
        return request.row.max_depth > 0


def _check(spec: Spec) -> None:
    """Raise CapabilityError for a method that needs the target's hidden states or a model of its own."""
    for part in spec.parts:
        if not part.method.detached:
            able = ", ".join(method.name for method in methods() if method.detached)
            raise CapabilityError(
                f"the drafter {part.method.name!r} needs more of the target than its text, which vLLM does not hand to "
                f"a custom class; use {able}"
            )


def _best_path(tree: DraftTree, longest: int) -> DraftTree:
    """The path of a tree with the most expected accepted tokens, at most ``longest`` of them, as a tree."""

    def expected(leaf: int) -> tuple[float, int]:
        path = tree.path_to(leaf)[1 : longest + 1]
        logs = None if tree.log_probs is None else tree.log_probs[list(path)]
        return (float(len(path)) if logs is None else sum(map(math.exp, logs.tolist())), -leaf)

    best = max(tree.leaves, key=expected)
    return tree.select(tree.path_to(best)[: longest + 1])


def _stand_in(model: Any, spec: Spec) -> Decoder:
    """A decoder without weights that has the target's vocabulary and tokenizer, by which tables are checked."""
    config = ModelConfig(
        family="llama",
        vocab_size=int(model.get_vocab_size()),
        hidden_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=32,
        max_positions=int(model.max_model_len),
    )
    decoder = build_decoder(config)
    if any(part.method.tables is not None for part in spec.parts):
        from transformers import AutoTokenizer

        name_tokenizer(decoder, AutoTokenizer.from_pretrained(model.tokenizer))
    return decoder
