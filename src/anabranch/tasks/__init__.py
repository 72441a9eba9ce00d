"""Applications: a prompt template, the field of the completion, and metrics of quality; known ones and your own files.

This room handles text only. ``bench task`` measures quality and speed, ``train --task`` learns from the completions.
"""

from anabranch.tasks.catalogue import TASKS, find_task
from anabranch.tasks.metrics import METRICS, Metric, check_metrics, difference, spread
from anabranch.tasks.rows import SPLITS, TaskRow, TrainingRows, rows_of, sample, training_rows
from anabranch.tasks.template import Task, Template

__all__ = [
    "METRICS",
    "SPLITS",
    "TASKS",
    "Metric",
    "Task",
    "TaskRow",
    "Template",
    "TrainingRows",
    "check_metrics",
    "difference",
    "find_task",
    "rows_of",
    "sample",
    "spread",
    "training_rows",
]
