"""The trained part of methods with draft heads: residual blocks, and the vocabulary that each head scores.

Head k of position t predicts token t + 1 + k; the target's own head predicts t + 1. Each head turns the target's state
after the last norm into another state, which a vocabulary head scores: the target's (``shared``), or one of the head's
own that begins as a copy of it (``own``, the papers').

K heads, M positions, D model width, Vd draft vocabulary, C embeddings that a block is conditioned on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.drafting.counting import WEIGHT_BYTES, DraftCost, matrix_weights, parameters
from anabranch.drafting.head import DraftHead
from anabranch.drafting.trained import TrainedModule, check_shape
from anabranch.learning.loss import Vocabulary
from anabranch.methods.heads.recipes import HeadConfig
from anabranch.model.config import ModelConfig
from anabranch.model.decoder import Decoder
from anabranch.model.pack import Packable, packed_like

__all__ = [
    "DraftHeads",
    "HeadConfig",
    "ResidualBlock",
    "VocabularyHeads",
    "begin_with",
    "described",
    "first_blocks",
    "read_once",
    "start_from_target",
]


class ResidualBlock(Packable):
    """x -> R x + silu(W x + b), at first the identity on the state: W is zero, and R passes it on.

    x is a state and C embeddings, [..., (1 + C) D]. Without embeddings R is the identity and not trained.
    """

    def __init__(self, width: int, conditions: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, (1 + conditions) * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.residual = nn.Parameter(torch.eye(width, (1 + conditions) * width)) if conditions else None
        self.residual_bias = nn.Parameter(torch.zeros(width)) if conditions else None

    @property
    def both(self) -> Tensor:
        """W, and R below it if it is trained."""
        return self.weight if self.residual is None else torch.cat((self.weight, self.residual))

    def products(self) -> Iterable[tuple[str, Tensor]]:
        """The product of ``forward``."""
        return (("both", self.both),)

    def forward(self, x: Tensor) -> Tensor:
        """[..., (1 + C) D] -> [..., D]."""
        y = self.linear(x, "both")
        if self.residual_bias is None:
            whole: Tensor = x + F.silu(y + self.bias)
            return whole
        inner, kept = y.chunk(2, dim=-1)
        return kept + self.residual_bias + F.silu(inner + self.bias)


class DraftHeads(TrainedModule):
    """The base class of modules with draft heads.

    blocks      the residual blocks of each head
    weights     each head's own vocabulary head [Vd, D], over the draft vocabulary; None: the target's is used
    biases      a bias [Vd] for each of these; None: the target's is used, if it has one
    vocabulary  [Vd] the sorted token ids of the draft vocabulary
    """

    config: HeadConfig
    reads_texts = False  # whether what the heads read at a position depends on the positions before it

    def __init__(
        self, model: ModelConfig, config: HeadConfig, vocabulary: Tensor | None, conditions: Sequence[int]
    ) -> None:
        """``conditions`` [K] are the embeddings that each head's first block is conditioned on."""
        super().__init__()
        self.model, self.config = model, config
        width = model.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResidualBlock(width, count if layer == 0 else 0) for layer in range(config.num_layers))
            for count in conditions
        )
        ids = torch.arange(model.vocab_size) if vocabulary is None else vocabulary.long().cpu()
        self.register_buffer("vocabulary", ids, persistent=True)
        self.weights = (
            nn.ParameterList(nn.Parameter(torch.zeros(len(ids), width)) for _ in conditions)
            if config.head == "own"
            else None
        )
        self.biases: nn.ParameterList | None = None

    @property
    def lowest(self) -> int:
        """Above all layers of a frozen target: heads read its last states."""
        return self.model.num_layers

    def chain(self, k: int) -> list[ResidualBlock]:
        """The blocks of a head, counted from 0."""
        blocks = self.blocks[k]
        assert isinstance(blocks, nn.ModuleList)
        return [block for block in blocks if isinstance(block, ResidualBlock)]

    def head(self, k: int, x: Tensor, *, first: int = 0) -> Tensor:
        """A head's blocks from ``first`` on: [..., (1 + C) D] -> [..., D]."""
        for block in self.chain(k)[first:]:
            x = block(x)
        return x

    def prefix(self, target: Decoder, hidden_BTD: Tensor) -> Tensor:
        """Input of the heads for whole texts [B, T, D], from the target's states; here, these."""
        return hidden_BTD

    @abstractmethod
    def predicted(self, target: Decoder, states_MD: Tensor, path_MK: Tensor) -> Tensor:
        """The heads' states [M, K, D] at some positions, given the true tokens on the path to each prediction.

        path_MK  the tokens after each position: the root of a draft, then the tokens that heads 1, 2, ... predict
        """

    def pack(self, target: Decoder, *, first: int = 0) -> None:
        """Pack the heads' blocks from ``first`` on like the target's head, if that is packed."""
        for k in range(self.config.num_heads):
            for block in self.chain(k)[first:]:
                block.pack(target.head)

    def vocabularies(self, target: Decoder, *tokens: Tensor) -> list[Vocabulary]:
        """Vocabulary of each head; one that shares the target's head adds the given tokens."""
        if self.weights is None:
            return [Vocabulary.of(target, self.vocabulary, *tokens)] * self.config.num_heads
        ids = self.vocabulary.to(target.device)
        place = torch.full((target.config.vocab_size,), -1, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        bias = None if target.head.bias is None else target.head.bias[ids]
        biases = [bias] * len(self.weights) if self.biases is None else self.biases
        return [Vocabulary(weight, bias, place) for weight, bias in zip(self.weights, biases, strict=True)]


class VocabularyHeads:
    """The scores of heads' states, for all drafters of a module and its target.

    shared  the target's head over the draft vocabulary, if heads have none of their own
    own     one for each head otherwise
    read    bytes of weights that scoring reads, once for each head that has one of its own
    """

    def __init__(self, target: Decoder, module: DraftHeads) -> None:
        self.shared = DraftHead(target, module.vocabulary) if module.weights is None else None
        weights = list(module.weights or ())
        biases = module.biases or [None] * len(weights)
        self.own = [
            DraftHead(target, module.vocabulary, weight.detach(), None if bias is None else bias.detach())
            for weight, bias in zip(weights, biases, strict=True)
        ]
        self.read = sum(head.read for head in self.own) if self.shared is None else self.shared.read

    def __getitem__(self, k: int) -> DraftHead:
        """The scores of head ``k``, counted from 0."""
        return self.own[k] if self.shared is None else self.shared


def first_blocks(target: Decoder, module: DraftHeads) -> nn.Module | None:
    """The first blocks of all heads as one packed product [K D, D], where the target's head is packed."""
    blocks = [module.chain(k)[0] for k in range(module.config.num_heads)]
    return packed_like(
        target.head,
        torch.cat([block.weight.detach() for block in blocks]),
        torch.cat([block.bias.detach() for block in blocks]),
    )


def start_from_target(target: Decoder, module: DraftHeads) -> None:
    """Copy the target's head into heads of their own, in which training begins."""
    for weight in module.weights or ():
        with torch.no_grad():
            weight.copy_(target.head_rows(module.vocabulary.to(target.device)))


def begin_with(module: DraftHeads, trained: DraftHeads) -> None:
    """Copy the weights of trained heads of the same shape. Raises InputError.

    The module keeps its own draft vocabulary: tokens that the trained heads do not draft keep their rows.
    """
    check_shape(module.config.to_dict(), trained.config.to_dict())
    weights = {
        name: value
        for name, value in trained.state_dict().items()
        if name != "vocabulary" and not name.startswith(("weights.", "biases."))
    }
    module.load_state_dict(weights, strict=False)
    known = {token: place for place, token in enumerate(trained.vocabulary.tolist())}
    both = [(place, known[token]) for place, token in enumerate(module.vocabulary.tolist()) if token in known]
    ours, others = (
        [value for values in (heads.weights, heads.biases) for value in values or ()] for heads in (module, trained)
    )
    for mine_V, theirs_V in zip(ours, others, strict=True):
        here, there = torch.tensor(both).T.to(mine_V.device)
        with torch.no_grad():
            mine_V[here] = theirs_V[there].to(mine_V)


def described(config: HeadConfig, read: str = "") -> str:
    """The size of heads in a few words; ``read`` says what they read besides the target's state."""
    scored = "scored by the target's head" if config.head == "shared" else "with vocabulary heads of their own"
    blocks = "1 residual block" if config.num_layers == 1 else f"{config.num_layers} residual blocks"
    return f"{config.num_heads} heads of {blocks}{read}, {scored}"


def read_once(heads: nn.Module) -> DraftCost:
    """The cost of heads that are read once per draft."""
    read = matrix_weights(heads)
    return DraftCost(parameters(heads), WEIGHT_BYTES * read, 2 * read)
