"""Options of ``anabranch train ngram``, without torch."""

from __future__ import annotations

from anabranch.learning.recipe import Option, Training

__all__ = ["TRAINING"]

TRAINING = Training("a table of n-grams", {"memory": Option(int, "use at most this many MB (default: 512)")})
