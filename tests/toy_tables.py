"""Texts of token ids, and tables built from them, for the methods that draft from tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.drafting.tables import OpenTables, Tokenizer, build_tables, open_tables
from anabranch.methods import Method, methods
from small import VOCABULARY

TOY = Tokenizer("toy", "f" * 64, VOCABULARY)


def method(name: str) -> Method:
    """An entry of the registry that has tables."""
    return next(entry for entry in methods() if entry.name == name)


def write(name: str, documents: Sequence[Sequence[int]], folder: Path, **options: Any) -> dict[str, Any]:
    """Build the tables of a method from documents over the toy's vocabulary."""
    entry = method(name)
    vocab_size = options.pop("vocab_size", VOCABULARY)
    texts = (np.array(ids, np.int64) for ids in documents)
    tokenizer = Tokenizer(TOY.name, TOY.fingerprint, vocab_size)
    return build_tables(entry.tables, texts, folder, tokenizer=tokenizer, **options)


def opened(name: str, folder: Path, vocab_size: int = VOCABULARY) -> OpenTables:
    """Open what ``write`` wrote."""
    entry = method(name)
    return open_tables(entry.tables, folder, TOY.fingerprint, vocab_size)
