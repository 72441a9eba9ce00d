"""An entry of the table of families, and the source of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anabranch.model.config import ModelConfig

__all__ = ["Family", "Fields", "HfConfig", "Layout", "Source"]

HfConfig = Mapping[str, Any]
Fields = dict[str, Any]  # honoured fields of config.json with their defaults, or fields of a ModelConfig
# How a matrix is stored: as ours, transposed (GPT-2's Conv1D), or q, k, v of head 0, then of head 1, ... (NeoX)
Layout = Literal["rows", "transposed", "by_head"]


@dataclass(frozen=True)
class Source:
    """The Hugging Face tensors that one of our parameters is assembled from, concatenated along rows.

    Each tensor has alternative names, the most common one first: files may lack or repeat the outer prefix,
    and a tied head may be stored under either name.
    """

    tensors: tuple[tuple[str, ...], ...]
    layout: Layout = "rows"


@dataclass(frozen=True)
class Family:
    """An entry of the table. ``block`` maps our modules of a layer to theirs; other fields name the modules outside.

    In the names of an expert's modules, ``{}`` stands for its number.

    ungated  the modules of an MLP without a gate, where the family has both kinds
    tables   other full names of an embedding that encoder and decoder share
    encoder  the modules of the encoder
    """

    describe: Callable[[Fields], ModelConfig]
    block: Mapping[str, tuple[str, ...]]
    prefixes: tuple[str, ...] = ("model.", "")
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    heads: tuple[str, ...] = ("lm_head",)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    ungated: tuple[str, ...] = ()
    relative: str = ""
    norm_embedding: str = ""
    tables: tuple[str, ...] = ()
    head_bias: str = ""
    encoder: Family | None = None
