"""Compare ways to tune a model for an application: quality, speed and size on the same test rows.

    research/train_application sql DIR 1200 SQL
    python research/compare_application.py --task sql --data DIR --forms SQL --out benchmarks/application-sql-DATE.json

Every tuned model in the folder FORMS decodes the rows by ``anabranch bench task``, plainly and with its own drafter,
and the model that plain LoRA made also with every adapter that was trained for it and with a drafter that needs no
training. With --scored, quality is that of plain decoding on so many rows, decoded 32 at a time, and of the untuned
model too. Results stay in FORMS/bench; run again, it measures what is missing (--force: everything). Run nothing else
at the same time. ``python research/applications_page.py`` turns the newest results into docs/applications.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch
from anabranch.adapters.folder import CONFIG, read_record
from anabranch.adapters.record import method_of
from anabranch.bench.compare import read_result
from anabranch.bench.suites import Application
from anabranch.bench.task_table import collect
from anabranch.errors import AnabranchError, InputError
from anabranch.model.peft import WEIGHTS as LORA_WEIGHTS
from anabranch.support.files import check_output, check_writable, shown_command, write_atomically
from anabranch.train.lora import RECORD
from task_scores import ROWS, Columns, answers, compared, scores_of

PLAIN = "lora"  # the form that all others are compared with
FREE = "prompt_lookup"
UNTUNED = "untuned"


@dataclass(frozen=True)
class Run:
    """One run of ``anabranch bench``: a tuned model and its drafters.

    label     of the model
    words     options that load it
    drafters  specifications by label
    forms     folders of what was trained for it afterwards
    """

    label: str
    words: tuple[str, ...]
    drafters: dict[str, str]
    forms: tuple[str, ...] = ()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", required=True, help="sql, e2e, dialogsum or a JSONL file")
    add("--data", type=Path, help="folder with the data sets")
    add("--forms", type=Path, required=True, help="folder with the tuned models of research/train_application")
    add("--model", default="default", help="the model that was tuned")
    add("--limit", type=int, default=100, help="test rows")
    add("--max-new-tokens", type=int, default=96)
    add(
        "--scored", type=int, default=0, metavar="N", help="score N test rows a target, many at a time (0: those above)"
    )
    add("--prompt-template", help="as for 'anabranch bench task', like the next three")
    add("--completion")
    add("--raw", action="store_true")
    add("--dtype", default="auto")
    add("--nodes", type=int, nargs="+", default=[16], help="nodes of a draft, the root included")
    add("--only", nargs="+", default=[], metavar="FORM", help="measure these forms only, and leave the others out")
    add("--out", type=Path, required=True, help="write the result to this JSON file")
    add("--force", action="store_true", help="measure everything again")
    return parser.parse_args()


def runs(model: str, forms: Path, nodes: list[int], only: list[str]) -> list[Run]:
    """The runs, that of plain LoRA first. Raises InputError without it."""
    if not (forms / PLAIN / LORA_WEIGHTS).is_file():
        raise InputError(f"{forms} has no folder {PLAIN!r}; run research/train_application first")
    folders = [path.parent for path in sorted(forms.glob(f"*/{CONFIG}")) if path.parent.name != PLAIN]
    joint, later = [], []
    for folder in folders:
        if not only or folder.name in only:
            (joint if (folder / "lora").is_dir() else later).append(folder)
    loading = ["--model", model, "--lora", str(forms / PLAIN)]
    drafters = {FREE: FREE}
    for folder in later:
        loading += ["--adapter", str(folder)]
        drafters |= _drafters(folder, nodes)
    found = [Run(PLAIN, tuple(loading), drafters, tuple(folder.name for folder in later))]
    for folder in joint:
        words = ("--model", str(folder / "model"), "--adapter", str(folder))
        found.append(Run(folder.name, words, _drafters(folder, nodes)))
    return found


def _drafters(folder: Path, nodes: list[int]) -> dict[str, str]:
    record = read_record(folder)
    method = method_of(record)[0].name
    found = {f"{folder.name} {count}": f"{method}:nodes={count}" for count in nodes}
    if method != "streams" or record["config"]["main_attends"] == "own":
        return found  # a quantised copy drafts only before streams that trail
    return found | {f"{name}, quantized_draft": f"{spec}+quantized_draft" for name, spec in found.items()}


def measure(run: Run, args: argparse.Namespace, path: Path) -> None:
    """One run of ``anabranch bench``. Raises InputError if it fails."""
    if path.is_file() and not args.force and json.loads(path.read_text(encoding="utf-8"))["complete"]:
        return
    command = [sys.executable, "-m", "anabranch", "bench", "task", args.task, *run.words]
    command += ["--limit", str(args.limit), "--max-new-tokens", str(args.max_new_tokens), "--examples", "0"]
    command += ["--dtype", args.dtype, *(["--raw"] if args.raw else [])]
    for name in ("data", "prompt_template", "completion"):
        command += [] if (value := getattr(args, name)) is None else [f"--{name.replace('_', '-')}", str(value)]
    for name, spec in {"none": "none", **run.drafters}.items():
        command += ["--method", f"{name}={spec}"]
    path.parent.mkdir(exist_ok=True)
    done = subprocess.run([*command, "--out", str(path), "--force"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"'anabranch bench' failed for {run.label}: {done.stderr.strip().splitlines()[-1]}")


def quality(planned: list[Run], args: argparse.Namespace) -> dict[str, Any]:
    """Scores of every target's plain decoding on ``args.scored`` test rows, with differences from plain LoRA's."""
    application = Application.read(
        args.task, data=args.data, limit=args.scored, template=args.prompt_template, completion=args.completion
    )
    scores, texts_of = {}, {}
    for label, words in {UNTUNED: ("--model", args.model), **{run.label: run.words for run in planned}}.items():
        path = args.forms / "bench" / f"{label}-answers.json"
        texts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and not args.force else []
        if len(texts) != len(application.rows):
            given = dict(zip(words[::2], words[1::2], strict=True))
            where = {"lora": given.get("--lora"), "adapter": given.get("--adapter"), "dtype": args.dtype}
            with anabranch.load(given["--model"], **where) as model:
                texts = [each.text for each in answers(model, application, args.max_new_tokens, raw=args.raw)]
            write_atomically(path, json.dumps(texts, indent=1) + "\n")
        scores[label], texts_of[label] = scores_of(application, texts), texts
        print(f"{time.strftime('%H:%M:%S')} {label}: {len(texts):,} rows scored", flush=True)
    return {
        "rows": len(application.rows),
        "decoded_at_a_time": ROWS,
        "targets": [
            {
                "target": label,
                **compared(own, scores[PLAIN]),
                **parted(application, label, texts_of, scores),
            }
            for label, own in scores.items()
        ],
    }


def parted(
    application: Application,
    label: str,
    texts: Mapping[str, Sequence[str]],
    scores: Mapping[str, Columns],
) -> dict[str, Any]:
    """Where a target and plain LoRA's part, by the first metric: rows that one of them alone has right, and an example.

    The example is the row that this target alone has right, of which the two texts begin alike for longest (ACL
    figure 7).
    """
    if label == PLAIN:
        return {}
    key = next(iter(scores[PLAIN]))
    pairs = list(zip(scores[label][key], scores[PLAIN][key], strict=True))
    won, lost = ([n for n, pair in enumerate(pairs) if pair == wanted] for wanted in ((1, 0), (0, 1)))
    found: dict[str, Any] = {"right_alone": len(won), "wrong_alone": len(lost)}
    if won:
        best = max(won, key=lambda n: _alike(texts[label][n], texts[PLAIN][n]))
        row = application.rows[best]
        found["example"] = {"row": row.name, "reference": row.references[0], PLAIN: texts[PLAIN][best]}
        found["example"] |= {"prompt": row.prompt, label: texts[label][best]}
    return found


def _alike(one: str, other: str) -> int:
    """The number of characters in which two texts begin alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def facts(folder: Path) -> dict[str, Any]:
    """The cost of training a form: parameters, bytes, seconds, data and command, from its folder."""
    if (folder / RECORD).is_file():  # a LoRA alone
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        training, extra, stored = record, 0, 0
    else:
        record = read_record(folder)
        training, extra = record["training"], record["parameters"]
        stored = (folder / "adapter.safetensors").stat().st_size
    lora = folder if extra == 0 else folder / "lora"
    return {
        "form": folder.name,
        "extra_parameters": extra,
        "bytes": stored,
        "lora_bytes": (lora / LORA_WEIGHTS).stat().st_size if (lora / LORA_WEIGHTS).is_file() else 0,
        "config": record.get("config"),
        "init": training.get("init"),
        "examples": training.get("examples"),
        "answer_tokens": training.get("answer_tokens"),
        "epochs": training["options"]["epochs"],
        "steps": training["steps"],
        "seconds": training["seconds"],
        "command": training["command"],
    }


def main() -> None:
    args = parse()
    try:
        check_output(args.out, force=args.force)
        check_writable(args.out)
        planned, files = runs(args.model, args.forms, args.nodes, args.only), {}
        for number, run in enumerate(planned, 1):
            files[run.label] = args.forms / "bench" / f"{run.label}.json"
            measure(run, args, files[run.label])
            print(f"{time.strftime('%H:%M:%S')} {run.label}: {number} of {len(planned)}", flush=True)
        results = {label: read_result(path) for label, path in files.items()}
        scored = quality(planned, args) if args.scored else None
    except AnabranchError as error:
        raise SystemExit(f"error: {error}") from None
    found = collect(list(results.items()))
    own = {(label, one["name"]): one for label, result in results.items() for one in result["contenders"]}
    for record in found["contenders"]:
        one = own[record["result"], record["name"]]
        record["own_speedup_quartiles"] = one["speedup_quartiles"]
        record["equal_texts"], record["acceptance_by_depth"] = one["equal_texts"], one.get("acceptance_by_depth")
    names = [run.label for run in planned] + [name for run in planned for name in run.forms]
    result = {
        "kind": "application",
        "command": shown_command("python", "research/compare_application.py", *sys.argv[1:], hidden=("--data",)),
        "model": results[PLAIN]["run"]["model"],
        "max_new_tokens": args.max_new_tokens,
        "environment": results[PLAIN]["environment"],
        "forms": [facts(args.forms / name) for name in names],
        **found,
    }
    if scored is not None:
        result["scored"] = scored
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
