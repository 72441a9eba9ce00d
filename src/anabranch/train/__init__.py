"""Training stream adapters: answers, examples, the loss, the loop, and what it will be worth in decoding."""

from anabranch.memory import keep_memory
from anabranch.train.answers import AnswerProgress, Prompt, read_prompts, write_answers
from anabranch.train.data import Batch, Example, frequent_tokens, read_examples, read_texts, split
from anabranch.train.objective import LossOptions, StreamObjective
from anabranch.train.recipes import OPTIONS, RECIPES, Recipe, recipe, recipe_with
from anabranch.train.replay import Replay, evaluate, replay
from anabranch.train.trainer import Progress, Trainer, TrainOptions

__all__ = [
    "OPTIONS",
    "RECIPES",
    "AnswerProgress",
    "Batch",
    "Example",
    "LossOptions",
    "Progress",
    "Prompt",
    "Recipe",
    "Replay",
    "StreamObjective",
    "TrainOptions",
    "Trainer",
    "evaluate",
    "frequent_tokens",
    "keep_memory",
    "read_examples",
    "read_prompts",
    "read_texts",
    "recipe",
    "recipe_with",
    "replay",
    "split",
    "write_answers",
]
