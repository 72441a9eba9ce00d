"""What a task is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.tasks.template import Conversation, Template

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """An application: how rows of a data set become prompts, what should be answered, and how answers are scored.

    name        short, for tables and result files
    template    of the prompt; or rows are conversations that end with the completion
    completion  the fields that may hold the completion, a text or a list of references; the first that a row has counts
    metrics     names of ``METRICS``
    folder      the folder of a known data set, with a file per split
    file        the JSONL file of a task of one's own, from which the splits are drawn
    licence     of the data, empty if unknown
    commercial  whether the licence allows commercial use
    """

    name: str
    template: Template | Conversation
    completion: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: str = ""
    file: Path | None = None
    licence: str = ""
    commercial: bool = True
