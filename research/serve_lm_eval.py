"""Evaluate a server with lm-evaluation-harness, and hold its results against direct calls of the model.

    pip install "lm-eval[api]" transformers    # in an environment of its own
    python research/serve_lm_eval.py --lm-eval ENVIRONMENT/bin/lm_eval --out benchmarks/lm-eval-DATE.json

Two small tasks on data that is written here, so nothing is downloaded: answers to choose from, by the log
probabilities of ``local-completions``, and answers to write, by ``local-completions`` and ``local-chat-completions``.
Each sample's log probability has to equal ``model.score`` (to 1e-4), each text ``model.generate`` or ``model.chat``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anabranch
from anabranch.api import Model
from anabranch.errors import InputError
from measured import result_options, write_measured
from serve_load import CHAT, say, started

DOCS = (
    ("The capital of France is", ["Paris", "London", "Rome"], 0),
    ("Water freezes at a temperature of", ["100 degrees", "0 degrees", "50 degrees"], 1),
    ("The opposite of hot is", ["warm", "cold", "dry"], 1),
    ("Two plus three is", ["five", "six", "nine"], 0),
    ("A week has", ["five days", "ten days", "seven days"], 2),
    ("The largest planet is", ["Mars", "Venus", "Jupiter"], 2),
)
NEW = 16
TOLERANCE = 1e-4
TASKS: dict[str, dict[str, Any]] = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"},
    "words": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False},
    },
}
RUNS = (("local-completions", "choices"), ("local-completions", "words"), ("local-chat-completions", "words"))


def write_tasks(folder: Path) -> None:
    """The documents and the tasks' files; lm-eval's YAML takes JSON."""
    documents = [{"question": asked, "choices": choices, "answer": right} for asked, choices, right in DOCS]
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    for name, task in TASKS.items():
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))


def evaluated(program: str, kind: str, task: str, url: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Run lm-eval; its samples."""
    path = CHAT if "chat" in kind else "/v1/completions"
    options = f"model=claude-any,base_url={url}{path},tokenizer_backend=huggingface,tokenizer={folder / 'tokenizer'}"
    out = folder / f"{kind}-{task}"
    words = [program, "--model", kind, "--model_args", options + ",num_concurrent=3", "--tasks", task]
    words += ["--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    words += ["--apply_chat_template"] if "chat" in kind else []
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "OPENAI_API_KEY": "any",
    }
    done = subprocess.run(words, env=os.environ | offline, capture_output=True, text=True, check=False)
    found = sorted(out.rglob("samples_*.jsonl"))
    if done.returncode or not found:
        raise InputError(f"lm-eval failed ({done.returncode}): {done.stderr[-1500:]}")
    for line in found[-1].read_text().splitlines():
        yield json.loads(line)


def differences(model: Model, kind: str, task: str, sample: dict[str, Any]) -> list[float | str]:
    """The difference of a sample's results from the model's own: in log probabilities, or another text."""
    asked = str(sample["doc"]["question"])
    if task == "words":
        options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "stop": ["\n"]}
        if "chat" in kind:
            mine = model.chat([{"role": "user", "content": asked}], **options).text
        else:
            mine = model.generate(model.tokenizer.encode(asked, add_special_tokens=False), **options).text
        theirs = sample["resps"][0][0]
        return [0.0 if mine == theirs else f"{theirs!r} instead of {mine!r}"]
    found: list[float | str] = []
    begun = len(model.tokenizer.encode(asked, add_special_tokens=False))
    for choice, answer in zip(sample["doc"]["choices"], sample["resps"], strict=True):
        ids = model.tokenizer.encode(f"{asked} {choice}", add_special_tokens=False)
        logs = model.score(ids).log_probs[begun - len(ids) :]
        found.append(abs(sum(map(float, logs)) - float(answer[0][0])))
    return found


def run(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    write_tasks(folder)
    found = []
    with anabranch.load(args.model) as model, started("server", "", args.model) as url:
        model.tokenizer.save_pretrained(folder / "tokenizer")
        for kind, task in RUNS:
            each = [
                difference
                for sample in evaluated(args.lm_eval, kind, task, url, folder)
                for difference in differences(model, kind, task, sample)
            ]
            wrong = [value for value in each if isinstance(value, str) or value > TOLERANCE]
            largest = max((value for value in each if not isinstance(value, str)), default=0.0)
            found.append({"model": kind, "task": task, "compared": len(each), "largest": largest, "different": wrong})
            say(json.dumps(found[-1]))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all tasks."""
    if shutil.which(args.lm_eval) is None:
        raise InputError(f"there is no program {args.lm_eval!r}; give the path of lm_eval in its environment")
    with tempfile.TemporaryDirectory() as folder:
        return {"runs": run(args, Path(folder))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="the model")
    parser.add_argument("--lm-eval", required=True, metavar="PROGRAM", help="lm_eval of an environment of its own")
    result_options(parser)
    found = write_measured(parser.parse_args(), measure)["runs"]
    if any(each["different"] or not each["compared"] for each in found):
        raise SystemExit("serve_lm_eval.py: results differ from direct calls")


if __name__ == "__main__":
    main()
