"""Training: completions, examples, the training loop, checkpoints, and predictions of decoding speed.

All of this is shared by all methods; what is specific to a method is in its entry (``Method.trained``).
"""

from anabranch.learning.examples import Batch, Example
from anabranch.learning.recipe import Recipe, TrainOptions
from anabranch.support.memory import keep_memory
from anabranch.train.answers import AnswerProgress, EncodedPrompt, read_prompts, write_answers
from anabranch.train.data import frequent_tokens, read_examples, read_texts, split
from anabranch.train.job import read_data, train_adapter, trainable
from anabranch.train.trainer import Progress, Trainer

__all__ = [
    "AnswerProgress",
    "Batch",
    "EncodedPrompt",
    "Example",
    "Progress",
    "Recipe",
    "TrainOptions",
    "Trainer",
    "frequent_tokens",
    "keep_memory",
    "read_data",
    "read_examples",
    "read_prompts",
    "read_texts",
    "split",
    "train_adapter",
    "trainable",
    "write_answers",
]
