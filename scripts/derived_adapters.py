"""What the scripts that make an adapter from trained ones share: records, and acceptance on held-out answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anabranch.adapters.folder import LoadedAdapter, TargetIdentity, save_adapter
from anabranch.methods import Method
from anabranch.model.load import Target
from anabranch.support.files import shown_command
from anabranch.train.arithmetic import learner_of
from anabranch.train.data import read_examples, split
from anabranch.train.job import as_measured, packed_copy
from anabranch.train.trainer import TREES


def evaluated(target: Target, method: Method, module: Any, training: dict[str, Any], answers: Path) -> dict[str, Any]:
    """What a module reaches on the held-out ones of some answers."""
    assert method.trained is not None
    held_out, seed, longest = training["held_out"], training["options"]["seed"], training["max_tokens"]
    examples = read_examples(answers, vocab_size=target.config.vocab_size, max_tokens=longest)
    _, unseen = split(examples, held_out, seed)
    recipe, frozen = method.trained.recipe(None, {}), packed_copy(target)
    objective = method.trained.objective(
        learner_of(target.decoder, "stored", torch.float32), module.float(), recipe, frozen=frozen
    )
    return as_measured(objective.evaluate(unseen, nodes=TREES), held_out, objective.predictor)


def save_derived(
    out: Path,
    module: Any,
    source: LoadedAdapter,
    target: Target,
    words: Sequence[str],
    answers: Path | None,
    **facts: Any,
) -> None:
    """Write a module that was made from an adapter: the record has one more command, and ``facts`` about it.

    words    the command, without ``python`` and --out
    answers  what ``source`` was trained on; the held-out part is evaluated
    """
    training = {**source.record["training"], **facts}
    command = shown_command("python", *words, "--out", out.name)
    training["command"] = f"{training['command']}\n{command}"
    measured = {} if answers is None else evaluated(target, source.method, module, training, answers)
    made = save_adapter(
        *(out, module), method=source.method, target=TargetIdentity.of(target), training=training, measured=measured
    )
    print(f"wrote {out}: {made['bytes']:,} bytes, SHA-256 {made['sha256']}")
