"""Trainings that build tables from text, without torch."""

from __future__ import annotations

from anabranch.learning.recipe import Option, Training

__all__ = ["DATASTORE", "NGRAMS"]

_MEMORY = {"memory": Option(int, "use at most this many MB (default: 512)")}
DATASTORE = Training("a datastore", _MEMORY)
NGRAMS = Training("a table of n-grams", _MEMORY)
