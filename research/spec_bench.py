"""Let Spec-Bench's own evaluation (github.com/hemingkx/Spec-Bench) drive our engine, and put its numbers beside ours.

    git clone https://github.com/hemingkx/Spec-Bench
    python research/spec_bench.py --spec-bench Spec-Bench --method streams --limit 12 --out FOLDER

``forward`` is the adapter: a ``forward_func`` for Spec-Bench's ``run_eval``. Its ``evaluation/eval.py`` runs as it is,
once by plain decoding and once by the method, and its ``evaluation/speed.py`` reads what came out. On a machine without
CUDA and fastchat that takes stand-ins, all of them in ``stand_in``:

fastchat     eval.py takes two functions of it: ``load_questions``, whose module imports clients of two services,
             and ``get_conversation_template``, asked for Vicuna's whatever the model is: here it is the model's own
shortuuid    if it is not installed: names answers
synchronize  of torch.cuda, without which torch raises; nothing is waited for where there is no GPU
tokenizer    what it returns is sent ``.to("cuda")``, which here changes nothing

docs/metrics.md says why the two columns of numbers differ.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import anabranch
from anabranch.bench.summary import quartiles
from anabranch.errors import AnabranchError, CapabilityError, FileError, InputError
from anabranch.model.text import render_chat
from anabranch.support.files import write_atomically
from anabranch.support.jsonfiles import read_rows
from anabranch.support.table import Table

Answers = list[dict[str, Any]]


# -- the adapter -----------------------------------------------------------------------------------------------------
def forward(
    inputs: Any, model: Any, tokenizer: Any, max_new_tokens: int, **options: Any
) -> tuple[Tensor, int, int, list[int]]:
    """Spec-Bench's ``forward_func``: (ids of prompt and answer [1, L], new tokens, steps, tokens of each step).

    ``options`` are those of ``Model.stream``, as drafter="none". A step's tokens include the target's own and, in the
    last step, an end token.
    """
    prompt = inputs.input_ids[0].tolist()
    chunks = list(model.stream(prompt, max_new_tokens=max_new_tokens, **options))
    lengths = [len(chunk.token_ids) for chunk in chunks]
    new = [token for chunk in chunks for token in chunk.token_ids]
    return torch.tensor([prompt + new]), len(new), len(lengths), lengths


@dataclass
class Evaluated:
    """A model as eval.py wants it: it can be told that nothing is trained."""

    model: anabranch.Model
    training: bool = False

    def eval(self) -> Evaluated:
        return self

    def stream(self, prompt: list[int], **options: Any) -> Any:
        return self.model.stream(prompt, **options)


@dataclass
class Inputs:
    """Token ids [1, L] that stay where they are."""

    input_ids: Tensor

    def to(self, device: str) -> Inputs:
        return self


class Tokenizer:
    """The model's tokenizer, except that it adds nothing to a prompt: a chat template has the special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: list[str], *, return_tensors: str) -> Inputs:
        return Inputs(self._tokenizer(texts, return_tensors=return_tensors, add_special_tokens=False).input_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass
class Conversation:
    """The part of a fastchat conversation that eval.py uses, by the model's own chat template."""

    tokenizer: Any
    name: str = "the model's own"
    roles: tuple[str, str] = ("user", "assistant")
    stop_str: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    messages: list[list[str | None]] = field(default_factory=list)

    def append_message(self, role: str, text: str | None) -> None:
        self.messages.append([role, text])

    def get_prompt(self) -> str:
        said = [{"role": role, "content": text} for role, text in self.messages if text is not None]
        return render_chat(self.tokenizer, said)


# -- Spec-Bench ------------------------------------------------------------------------------------------------------
def stand_in(tokenizer: Any) -> None:
    """Make eval.py importable and its calls possible, with as little as that takes."""

    def get_conversation_template(name: str) -> Conversation:
        return Conversation(tokenizer)

    def load_questions(path: str, begin: int | None, end: int | None) -> Answers:
        return read_lines(Path(path))[begin:end]

    found: dict[str, dict[str, Any]] = {
        "fastchat": {},
        "fastchat.model": {"get_conversation_template": get_conversation_template},
        "fastchat.llm_judge": {},
        "fastchat.llm_judge.common": {"load_questions": load_questions},
    }
    if importlib.util.find_spec("shortuuid") is None:
        found["shortuuid"] = {"uuid": lambda: uuid.uuid4().hex}
    for name, members in found.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


def check_spec_bench(folder: Path) -> None:
    """Raise FileError if ``folder`` holds no Spec-Bench."""
    for name in ("eval", "speed"):
        if not (folder / "evaluation" / f"{name}.py").is_file():
            raise FileError(f"{folder} is no checkout of Spec-Bench: it lacks evaluation/{name}.py")


def import_spec_bench(folder: Path) -> tuple[Any, Any]:
    """Its modules ``evaluation.eval`` and ``evaluation.speed``; ``stand_in`` comes first."""
    sys.path.insert(0, str(folder))
    return importlib.import_module("evaluation.eval"), importlib.import_module("evaluation.speed")


def read_lines(path: Path) -> Answers:
    """The JSON lines of a file, gzip'd or not."""
    return [row for _, row in read_rows(path)]


def spread(questions: Answers, limit: int | None) -> Answers:
    """``limit`` questions in even distances, so that every task has some."""
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, not {limit}")
    if limit is None or limit >= len(questions):
        return questions
    return [questions[place * len(questions) // limit] for place in range(limit)]


# -- the numbers -----------------------------------------------------------------------------------------------------
def theirs(speed: Any, answers: Path, plain: Path, tokenizer: Any) -> dict[str, float]:
    """The numbers that speed.py computes from two answer files."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        rate, base, ratio, lengths = speed.speed(str(answers), str(plain), folder, task="overall", report=False)
        _, _, itself, _ = speed.speed(str(plain), str(plain), folder, task="overall", report=False)
    return {
        "mean_acceptance_length": sum(lengths) / len(lengths),
        "tokens_per_second": float(rate),
        "plain_tokens_per_second": float(base),
        "speedup": float(ratio),
        "plain_over_itself": float(itself),
    }


def ours(answers: Answers, plain: Answers) -> dict[str, Any]:
    """The same by our definitions (docs/metrics.md), of the same answers and clocks; a question is all its turns."""

    def total(one: dict[str, Any], name: str) -> float:
        return float(sum(one["choices"][0][name]))

    def rates(some: Answers) -> list[float]:
        return [total(one, "new_tokens") / total(one, "wall_time") for one in some]

    def all_of(some: Answers, name: str) -> float:
        return sum(total(one, name) for one in some)

    rate, base = (all_of(some, "new_tokens") / all_of(some, "wall_time") for some in (answers, plain))
    ratios = quartiles([a / b for a, b in zip(rates(answers), rates(plain), strict=True)])
    assert ratios is not None
    return {
        "mean_acceptance_length": all_of(answers, "new_tokens") / all_of(answers, "decoding_steps"),
        "tokens_per_second": rate,
        "plain_tokens_per_second": base,
        "speedup": ratios[1],
        "speedup_quartiles": ratios,
        "speedup_total": rate / base,
        "plain_over_itself": 1.0,
        "equal_texts": sum(
            a["choices"][0]["turns"] == b["choices"][0]["turns"] for a, b in zip(answers, plain, strict=True)
        ),
    }


ROWS = {
    "mean_acceptance_length": "mean acceptance length",
    "tokens_per_second": "tokens/s",
    "plain_tokens_per_second": "tokens/s, plain decoding",
    "speedup": "speedup",
    "plain_over_itself": "speedup, plain over itself",
}


def show(found: dict[str, Any]) -> None:
    rows = [(title, *(f"{found[side][name]:.3f}" for side in ("spec_bench", "ours"))) for name, title in ROWS.items()]
    table = Table(
        ("", "Spec-Bench", "ours, of the same run"), rows, f"{found['method']}, {found['questions']} questions"
    )
    mine = found["ours"]
    low, _, high = mine["speedup_quartiles"]
    console = Console(soft_wrap=True, highlight=False)
    console.print(table.terminal())
    console.print(
        f"ours: quartiles of the speedup {low:.2f}-{high:.2f}, of the totals {mine['speedup_total']:.2f}; the same "
        f"texts as plain decoding's for {mine['equal_texts']} of {found['questions']} questions"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--spec-bench", type=Path, required=True, help="a checkout of Spec-Bench")
    parser.add_argument("--out", type=Path, required=True, help="folder for the answers, which must not be there yet")
    parser.add_argument("--model", default="default", help="default, a folder, a .gguf file or a hub id")
    parser.add_argument("--adapter", type=Path, help="adapter folder (default: the one that ships for the model)")
    parser.add_argument("--method", default="auto", help="a drafter and its settings, as streams:nodes=16")
    parser.add_argument("--questions", type=Path, help="JSON lines (default: those of the checkout)")
    parser.add_argument("--limit", type=int, help="that many questions, spread over the file")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new tokens a turn")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    files = {name: args.out.resolve() / f"{name}.jsonl" for name in ("questions", "plain", "method")}
    if there := [path for path in files.values() if path.exists()]:
        raise FileError(f"{there[0]} is there already, and Spec-Bench would write behind it; choose another --out")
    check_spec_bench(args.spec_bench)
    questions = args.questions or args.spec_bench / "data" / "spec_bench" / "question.jsonl"
    chosen = spread(read_lines(questions), args.limit)

    model = anabranch.load(args.model, drafter=args.method, adapter=args.adapter, dtype=args.dtype)
    if not model.tokenizer.chat_template:
        raise CapabilityError(f"{args.model} has no chat template, and Spec-Bench's questions are a conversation")
    stand_in(model.tokenizer)
    evaluation, speed = import_spec_bench(args.spec_bench.resolve())
    write_atomically(files["questions"], "".join(json.dumps(one) + "\n" for one in chosen))
    for name, drafter in (("plain", "none"), ("method", model.drafter)):
        evaluation.run_eval(
            model=Evaluated(model),
            tokenizer=Tokenizer(model.tokenizer),
            forward_func=forward,
            model_id=f"{args.model}, {drafter}",
            question_file=str(files["questions"]),
            question_begin=None,
            question_end=None,
            answer_file=str(files[name]),
            max_new_tokens=args.max_new_tokens,
            num_choices=1,
            num_gpus_per_model=1,
            num_gpus_total=1,
            drafter=drafter,
        )
        evaluation.reorg_answer_file(str(files[name]))
    found = {
        "method": model.drafter,
        "questions": len(chosen),
        "max_new_tokens": args.max_new_tokens,
        "spec_bench": theirs(speed, files["method"], files["plain"], model.tokenizer),
        "ours": ours(read_lines(files["method"]), read_lines(files["plain"])),
    }
    write_atomically(args.out / "summary.json", json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    try:
        main()
    except AnabranchError as error:
        sys.exit(f"error: {error}")
