"""Examples of a task: prompts by its template, completions from the data set itself."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.learning.examples import Example
from anabranch.learning.recipe import HELD_OUT, Recipe
from anabranch.model.load import Target
from anabranch.model.text import encode
from anabranch.prompts import chat_ids
from anabranch.tasks import Task, TaskRow, TrainingRows, find_task, sample, training_rows
from anabranch.train.answers import EncodedPrompt
from anabranch.train.data import left_out, warn_of_dropped

__all__ = ["TaskData"]


@dataclass(frozen=True)
class TaskData:
    """A task and the rows to train on.

    rows  the rows by split; ``train`` may be a sample of them, whose number before that is ``of``
    raw   whether prompts are continued as they are, without the chat template
    """

    task: Task
    rows: TrainingRows
    of: int
    raw: bool

    @staticmethod
    def read(
        text: str,
        *,
        data: Path | None = None,
        template: str | None = None,
        completion: str | None = None,
        limit: int | None = None,
        raw: bool = False,
    ) -> TaskData:
        """The rows of the task ``text``, a name or a JSONL file; ``limit`` of those of the split train.

        Warns if the data are for non-commercial use only. Raises InputError or FileError.
        """
        task = replace(find_task(text, template=template, completion=completion), metrics=())  # it scores nothing
        rows = training_rows(task, data)
        drawn = replace(rows, train=sample(rows.train, limit))
        if not task.commercial:
            warnings.warn(
                f"the data of {task.name} may not be used commercially ({task.licence}), and neither may what is "
                "trained on them; do not release it",
                TrainingWarning,
                stacklevel=2,
            )
        return TaskData(task, drawn, len(rows.train), raw)

    def examples(self, target: Target, recipe: Recipe) -> tuple[list[Example], list[Example]]:
        """The examples to train on, and as many to evaluate on as the recipe holds out, from the split validation.

        A row with several references is as many examples. Completions end with the end token, and are cut at the
        recipe's or the target's longest sequence. A warning counts those that are left out, by reason, and InputError
        is raised if none is left.
        """
        longest = min(recipe.max_tokens, target.config.max_positions)
        dropped: Counter[str] = Counter()
        train = [one for row in self.rows.train for one in self._of(row, target, longest, dropped)]
        if not train:
            why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
            raise InputError(
                f"the task {self.task.name} has no example to train on: {why}; shorten the prompts, or raise "
                "--max-tokens"
            )
        warn_of_dropped(dropped, len(train) + dropped.total(), f"examples of the task {self.task.name}")
        wanted = HELD_OUT if recipe.held_out is None else recipe.held_out
        held_out = sample(self.rows.validation, wanted) if wanted else []
        return train, [one for row in held_out for one in self._of(row, target, longest, Counter())[:1]]

    def _of(self, row: TaskRow, target: Target, longest: int, dropped: Counter[str]) -> list[Example]:
        """The examples of a row, one for each reference; ``dropped`` counts those that are left out."""
        prompt = tuple(self._prompt(row, target.tokenizer))
        examples = []
        for reference in row.references:
            completion = [*encode(target.tokenizer, reference, add_special_tokens=False), *_end(target)]
            if reason := left_out(len(prompt), len(completion), longest):
                dropped[reason] += 1
                continue
            examples.append(Example(prompt, tuple(completion[: longest - len(prompt)]), self.task.name, row.name))
        return examples

    def _prompt(self, row: TaskRow, tokenizer: Any) -> list[int]:
        return chat_ids(tokenizer, row.chat, raw=self.raw)

    def prompts(self, tokenizer: Any) -> list[EncodedPrompt]:
        """The prompts of the rows to train on, for the target to complete. Raises FileError for equal ids."""
        prompts: dict[str, EncodedPrompt] = {}
        for row in self.rows.train:
            if row.name in prompts:
                raise FileError(f"two rows of the task {self.task.name} have the id {row.name!r}; ids must be unique")
            prompts[row.name] = EncodedPrompt(row.name, self.task.name, tuple(self._prompt(row, tokenizer)))
        return list(prompts.values())

    @property
    def licences(self) -> dict[str, str]:
        """The licence of the data by source, for the card."""
        return {self.task.name: self.task.licence}

    def described(self) -> dict[str, Any]:
        """The task and its splits, for the adapter's record."""
        return {
            "name": self.task.name,
            "template": self.task.template.text,
            "completion": list(self.task.completion),
            "chat_template": not self.raw,
            "rows": {
                "train": len(self.rows.train),
                "of": self.of,
                "validation": len(self.rows.validation),
                "test": self.rows.test,
                "left_out": self.rows.left_out,
            },
            "commercial": self.task.commercial,
        }

    def summary(self) -> str:
        """The splits in a line."""
        rows = self.rows
        drawn = f" of {self.of:,}" if self.of > len(rows.train) else ""
        left = f"; {rows.left_out:,} rows left out, whose prompts are in another split" if rows.left_out else ""
        return (
            f"{self.task.name}: {len(rows.train):,}{drawn} rows to train on, {len(rows.validation):,} for validation, "
            f"{rows.test:,} for the test, none of which is trained on{left}"
        )


def _end(target: Target) -> tuple[int, ...]:
    """The token that ends a completion: the tokenizer's if the target stops at it, else the target's first, if any."""
    stops = target.config.eos_token_ids
    own = getattr(target.tokenizer, "eos_token_id", None)
    return (own,) if own in stops else stops[:1]
