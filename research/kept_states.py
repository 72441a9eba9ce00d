"""Measure what keeping the frozen target's states in 8 bits costs a training of streams: loss and predicted length.

    python research/kept_states.py --answers answers.jsonl --epochs 2

For each form of kept states, evaluates the adapter that ships on the completions, which reads states and trains
nothing, and trains fresh streams on them with the same seed and batches. Evaluations of trained streams read exact
states. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

from anabranch.adapters.folder import load_adapter
from anabranch.learning.examples import Example
from anabranch.model.load import Target, load_target
from anabranch.train import read_data, split, train_adapter, trainable
from anabranch.train.checkpoint import read_log
from anabranch.train.job import start_folder
from anabranch.train.states import KeptStates

LENGTHS = ("tree", "8 nodes")


def shipped(target: Target, examples: list[Example], folder: Path, form: Any) -> dict[str, Any]:
    """The evaluation of the adapter that ships, from kept states."""
    method = trainable("streams")
    assert method.trained is not None
    recipe = method.trained.training.recipe()
    start = start_folder("default", recipe, method, target)
    assert start is not None
    objective = method.trained.objective(
        target.decoder, load_adapter(start, target).module, recipe, frozen=target.decoder
    )
    objective.keep(KeptStates(folder, target.decoder, examples, identity="", form=form).keeping)
    found = objective.evaluate(examples, nodes=(8,))  # states that were just written are read, too
    return {**{name: found[name] for name in LENGTHS}, "top 1": found["top 1"]}


def trained(target: Target, examples: list[Example], folder: Path, form: str, epochs: float, recipe: str) -> Any:
    """The loss of the last third of a training, and its evaluation on held-out examples."""
    method = trainable("streams")
    assert method.trained is not None
    given = {"keep_states": form, "epochs": epochs, "held_out": 1, "evaluate_every": 10**6}
    plan = method.trained.training.recipe(recipe, given)
    learnt, held_out = split(examples, max(1, len(examples) // 5))
    own = train_adapter(target, method, plan, learnt, folder, own=held_out, report=lambda _: None)
    log = [line["loss"] for line in read_log(folder / "training")]
    lengths = own["measured"]["own prompts"]["predicted mean acceptance length"]
    return {
        "steps": own["training"]["steps"],
        "loss": round(statistics.mean(log[-max(1, len(log) // 3) :]), 4),
        **{name: lengths[name] for name in LENGTHS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--answers", type=Path, required=True, help="completions of the model")
    parser.add_argument("--model", default="default")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--limit", type=int, help="use so many of the completions")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    target = load_target(args.model, quantize="none")
    method = trainable("streams")
    assert method.trained is not None
    examples = read_data(target, method.trained.training.recipe(args.recipe), answers=args.answers)[: args.limit]
    tokens = sum(len(example.answer_ids) for example in examples)
    print(json.dumps({"examples": len(examples), "answer_tokens": tokens}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for form in ("exact", "int8"):
            found = shipped(target, examples, Path(folder), form)
            print(json.dumps({"adapter": "shipped", "states": form, **found}), flush=True)
        for form in ("exact", "int8"):
            found = trained(target, examples, Path(folder) / form, form, args.epochs, args.recipe)
            print(json.dumps({"adapter": f"trained, {args.recipe}", "states": form, **found}), flush=True)


if __name__ == "__main__":
    main()
