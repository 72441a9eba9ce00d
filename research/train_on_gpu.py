"""Train an adapter on a GPU that is lent for minutes: completions of prepared prompts, then the adapter.

A thousand prompts are completed at a time. Then training takes the seconds that are left.

    python research/build_prompts.py --data DIR --out asked.jsonl
    python research/build_code_prompts.py --count 3600 --out code.jsonl
    python research/train_on_gpu.py prepare MODEL.gguf asked.jsonl code.jsonl --out prompts.jsonl
    python research/train_on_gpu.py split MODEL.gguf --megabytes 60 --out PARTS
    python research/train_on_gpu.py train MODEL.gguf --prompts prompts.jsonl --seconds 190 --out ADAPTER
    python research/train_on_gpu.py train MODEL.gguf --answers ADAPTER.answers.jsonl --recipe paper-lossless --out PAPER

``prepare`` renders prompts as token ids on any machine, so that a lent one needs neither templates nor data. ``split``
cuts a model into files that a narrow transfer takes; ``train`` puts MODEL.gguf together where it is missing and
``--parts`` has them. It writes ADAPTER.answers.jsonl, with which ``anabranch train streams --answers`` goes on
anywhere. ``complete`` writes completions alone, on which several methods can be trained at the same time:

    python research/train_on_gpu.py complete MODEL --prompts prompts.jsonl --seconds 60 --out answers.jsonl
    python research/train_on_gpu.py train MODEL --answers answers.jsonl --method hydra --set head=own --out HYDRA

docs/gpu.md says what the sizes need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anabranch.model.decoder import Decoder
from anabranch.model.load import Target, load_target
from anabranch.prompts import chat_ids
from anabranch.support.files import shown_command
from anabranch.support.jsonfiles import read_rows
from anabranch.train import read_data, train_adapter, trainable
from anabranch.train.trainer import Progress

LONGEST = 900  # tokens of a prompt
BATCH = 1024  # prompts decoded at a time
PREFILL = 32768  # tokens of prompts that are read at a time
TOGETHER = 32  # tokens after which rows that have ended are dropped
NEW = 320  # tokens of a completion, at most
PROBE = 8  # steps that are timed to fit the epochs into the seconds that are left
SHAPED = "default-adapter"  # the recipe that takes the shapes below
RESERVE = 30.0  # seconds for the last evaluation and for writing
# by the width of the target: at most 16 MB in bf16
SHAPES: dict[int, dict[str, int]] = {
    896: {"stream_layers": 8, "adapter_rank": 16, "attention_rank": 32, "mlp_rank": 24},
    1536: {
        "stream_layers": 8,
        "adapter_rank": 16,
        "attention_rank": 24,
        "mlp_rank": 12,
        "conditioning_rank": 320,
        "root_width": 320,
    },
}
STEPS: dict[str, Any] = {"segment": 2048, "held_out": 48, "evaluate_every": 10**6}
RATE = 2e-3  # learning rate of those shapes
LICENCES = {
    "code tasks": "CC0-1.0",
    "oasst1_en": "Apache-2.0",
    "self_instruct_seed": "Apache-2.0",
    "gsm8k": "MIT",
    "sql_create_context": "CC BY 4.0",
    "wikitext2": "CC BY-SA 3.0",
    "e2e_nlg": "CC BY-SA 4.0",
    "gutenberg": "public domain",
    "natural_questions": "CC BY-SA 3.0",
    "ud_german_gsd": "CC BY-SA 4.0",
    "ud_german_pud": "CC BY-SA 3.0",
    "xquad_de": "CC BY-SA 4.0",
    "xquad_en": "CC BY-SA 4.0",
}


def prepare(args: argparse.Namespace) -> None:
    """Render prompts as token ids, in random order."""
    target, rng = load_target(args.model), random.Random(0)
    rows = [row for path in args.prompts for _, row in read_rows(path)]
    rng.shuffle(rows)
    kept, counts = [], dict[str, int]()
    for number, row in enumerate(rows):
        source = row["source"]
        ids = chat_ids(target.tokenizer, row["prompt"], raw=not row.get("chat", True), model=target.name)
        if len(ids) <= LONGEST and counts.get(source, 0) < args.most:
            counts[source] = counts.get(source, 0) + 1
            kept.append(json.dumps({"id": number, "source": source, "prompt_ids": ids}))
    args.out.write_text("\n".join(kept) + "\n", encoding="utf-8")
    print(f"{counts} -> {args.out}")


def split(args: argparse.Namespace) -> None:
    """Cut a file into numbered parts, with the SHA-256 of the whole beside them."""
    args.out.mkdir(parents=True, exist_ok=True)
    whole, count = hashlib.sha256(), 0
    with args.model.open("rb") as file:
        while part := file.read(args.megabytes * 10**6):
            (args.out / f"{args.model.name}.part{count:03}").write_bytes(part)
            whole.update(part)
            count += 1
    (args.out / f"{args.model.name}.sha256").write_text(whole.hexdigest() + "\n", encoding="ascii")
    print(f"{count} parts -> {args.out}")


def join(model: Path, parts: Path) -> None:
    """Put a file together from its parts. Raises ValueError if it is not what was cut."""
    whole, unfinished = hashlib.sha256(), model.with_name(model.name + ".joining")
    with unfinished.open("wb") as file:
        for part in sorted(parts.glob(f"{model.name}.part*")):
            content = part.read_bytes()
            whole.update(content)
            file.write(content)
    if whole.hexdigest() != (parts / f"{model.name}.sha256").read_text(encoding="ascii").strip():
        unfinished.unlink()
        raise ValueError(f"the parts of {model.name} in {parts} are not the whole file; copy them again")
    unfinished.rename(model)


@torch.inference_mode()
def decode(decoder: Decoder, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Greedy completions of at most ``new`` tokens, all prompts at once; they are padded on the left.

    The package's own loop is made for few rows and for drafts: with 256 rows it decoded 2,354 tokens a second on an
    H200. Here keys and values of a layer are written in place, attention reads them once for all heads that share them,
    and rows that have ended are dropped now and then.
    """
    c, device, width = decoder.config, decoder.device, max(map(len, prompts))
    ends = torch.tensor(c.eos_token_ids, device=device)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    shape = (len(prompts), c.num_kv_heads, width + new, c.head_dim)
    held = [[torch.empty(shape, dtype=decoder.dtype, device=device) for _ in "kv"] for _ in decoder.blocks]
    rope, scale = decoder.rope(), c.head_dim**-0.5

    def layers(ids_BR: Tensor, rows: slice, first: int) -> Tensor:
        """Tokens at places from ``first`` on -> the next token of each row."""
        end = first + ids_BR.shape[1]
        keys, own = torch.arange(end, device=device), torch.arange(first, end, device=device)[:, None]
        seen = ((keys <= own) & (keys >= starts[rows, None, None])) | (keys == own)
        cos, sin = rope((own[:, 0] - starts[rows, None]).clamp(min=0), width + new)
        x = decoder.embedding(ids_BR)
        for block, (keys_BKCE, values_BKCE) in zip(decoder.blocks, held, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, cache: Any = (keys_BKCE, values_BKCE)) -> Tensor:
                for kept, part in zip(cache, (k, v), strict=True):
                    kept[rows, :, first:end] = part.transpose(1, 2)
                k, v = (kept[rows, :, :end] for kept in cache)
                b, r, h, e = q.shape
                if r > 1:
                    q, k, v = q.transpose(1, 2), *(part.repeat_interleave(h // part.shape[1], 1) for part in (k, v))
                    a: Tensor = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)
                    return a.transpose(1, 2).reshape(b, r, h * e)
                scores = (q.view(b, k.shape[1], -1, e) @ k.transpose(2, 3)).float() * scale
                weights = scores.masked_fill_(~seen[:, None], -math.inf).softmax(-1)
                return (weights.to(v.dtype) @ v).view(b, 1, h * e)

            x = block(x, cos, sin, attend)
        return decoder.choose(decoder.normed(x[:, -1]))

    at_once = max(1, PREFILL // width)
    parts = [slice(start, start + at_once) for start in range(0, len(prompts), at_once)]
    following = torch.cat([layers(ids[part], part, 0) for part in parts])
    made: list[list[int]] = [[] for _ in prompts]
    row_of = list(range(len(prompts)))
    block: list[Tensor] = []
    for place in range(width, width + new):
        block.append(following)
        if len(block) == TOGETHER or place == width + new - 1:
            for row, tokens in zip(row_of, torch.stack(block, 1).tolist(), strict=True):
                made[row] += tokens
            going = ~torch.isin(torch.stack(block, 1), ends).any(1)
            block = []
            kept = going.nonzero()[:, 0]
            if not len(kept):
                break
            row_of = [row_of[each] for each in kept.tolist()]
            following, starts = following[kept], starts[kept]
            if len(kept) < len(going):
                held = [[part.index_select(0, kept) for part in layer] for layer in held]
        if place < width + new - 1:
            following = layers(following[:, None], slice(None), place)
    stops = set(c.eos_token_ids)
    return [row[: next((at for at, token in enumerate(row, 1) if token in stops), len(row))] for row in made]


def complete(decoder: Decoder, prompts: Path, out: Path, until: float, batch: int) -> None:
    """Greedy completions, a batch of prompts of like lengths at a time, the last one begun before ``until``."""
    rows = [row for _, row in read_rows(prompts)]
    pieces = [
        sorted(rows[n : n + 4 * batch], key=lambda row: len(row["prompt_ids"])) for n in range(0, len(rows), 4 * batch)
    ]
    ordered, total = [row for piece in pieces for row in piece], 0
    with out.open("w", encoding="utf-8") as file:
        for start in range(0, len(ordered), batch):
            if time.monotonic() > until:
                break
            group = ordered[start : start + batch]
            answers = decode(decoder, [row["prompt_ids"] for row in group], NEW)
            for row, answer in zip(group, answers, strict=True):
                file.write(json.dumps({**row, "answer_ids": answer}) + "\n")
            total += sum(map(len, answers))
            width = len(group[-1]["prompt_ids"])
            print(f"{len(group)} prompts of up to {width} tokens completed, {total} tokens so far", flush=True)


class _TimedError(Exception):
    """Enough steps were timed."""


def _loaded(args: argparse.Namespace) -> Target:
    if not args.model.exists() and args.parts is not None:
        join(args.model, args.parts)
    return load_target(str(args.model), dtype="bfloat16", device=args.device)


def only_complete(args: argparse.Namespace) -> None:
    """Complete prompts until ``--seconds`` have passed."""
    began = time.monotonic()
    complete(_loaded(args).decoder, args.prompts, args.out, began + args.seconds, args.batch)


def train(args: argparse.Namespace) -> None:
    """Complete prompts for ``--share`` of the time, and train in the rest."""
    began = time.monotonic()
    target = _loaded(args)
    answers = args.out.with_suffix(".answers.jsonl")
    print(f"{time.monotonic() - began:.0f} s: loaded", flush=True)
    if args.prompts is not None:
        complete(target.decoder, args.prompts, answers, began + args.share * args.seconds, args.batch)
    if args.answers:  # no prompt is learned twice; sounds all have the same one
        paths = (path for path in (answers, *args.answers) if path.exists())
        rows = {(*row["prompt_ids"], str(row.get("sound"))): row for path in paths for _, row in read_rows(path)}
        answers.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s: completed", flush=True)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    given: dict[str, Any] = {**STEPS, "batch_tokens": args.batch_tokens}
    if args.recompute:
        given["recompute"] = True
    if args.method == "streams" and args.recipe is None:
        args.recipe = SHAPED
        given["lr"] = RATE
        if args.init is None:
            given |= SHAPES.get(target.decoder.config.hidden_size, {})
    if args.lr is not None:
        given["lr"] = args.lr
    given |= dict(args.set)
    step, each = _rate(args, target, answers, given)
    left = args.seconds - (time.monotonic() - began) - RESERVE
    epochs = round(max(0.05, left / step / each), 2)
    print(f"{step:.3f} s a step, {epochs} epochs of {each} steps", flush=True)
    steps = max(1, int(epochs * each))
    given |= {"epochs": epochs, "warmup": min(50, 1 + steps // 10), "evaluate_every": 1 + steps // args.evaluations}

    def told(progress: Progress) -> None:
        if progress.evaluation is not None or progress.step % 20 == 0:
            accuracy = [round(share, 3) for share in progress.accuracy]
            print(f"step {progress.step}/{progress.steps}, loss {progress.loss:.3f}, {accuracy}", flush=True)

    record = _fit(args, target, answers, given, told, args.out)
    print(json.dumps({name: record[name] for name in ("parameters", "bytes", "measured")}))


def _rate(args: argparse.Namespace, target: Target, answers: Path, given: dict[str, Any]) -> tuple[float, int]:
    """Seconds of a step, and steps of an epoch."""
    marks: list[float] = []

    def timed(progress: Progress) -> None:
        marks.append(time.monotonic())
        if progress.step >= PROBE:
            raise _TimedError(progress.steps)

    try:
        _fit(args, target, answers, {**given, "epochs": 1.0, "warmup": 1}, timed, args.out.with_suffix(".probe"))
    except _TimedError as timing:
        return statistics.median(after - before for before, after in pairwise(marks[2:])), timing.args[0]
    raise ValueError(f"{answers} has fewer completions than {PROBE} steps take; complete more prompts")


def _fit(
    args: argparse.Namespace,
    target: Target,
    answers: Path,
    given: dict[str, Any],
    report: Callable[[Progress], None],
    out: Path,
) -> dict[str, Any]:
    """Train the method on the completions, and return the adapter's record."""
    method = trainable(args.method)
    assert method.trained is not None
    training = method.trained.training
    recipe = training.recipe(args.recipe, {n: v for n, v in given.items() if n in training.options or n not in STEPS})
    examples = read_data(target, recipe, answers=answers, anybodys=True)
    command = shown_command("python", "research/train_on_gpu.py", *sys.argv[1:])
    return train_adapter(
        *(target, method, recipe, examples, out),
        report=report, resume=False, licences=LICENCES, init=args.init, command=command,
    )  # fmt: skip


def setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, a value of the recipe."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(required=True)
    preparing = verbs.add_parser("prepare")
    preparing.add_argument("model", type=Path)
    preparing.add_argument("prompts", type=Path, nargs="+")
    preparing.add_argument("--most", type=int, default=1000, help="prompts of a source")
    preparing.add_argument("--out", type=Path, required=True)
    preparing.set_defaults(run=prepare)
    splitting = verbs.add_parser("split")
    splitting.add_argument("model", type=Path)
    splitting.add_argument("--megabytes", type=int, default=60, help="of a part, at most")
    splitting.add_argument("--out", type=Path, required=True)
    splitting.set_defaults(run=split)
    placed = argparse.ArgumentParser(add_help=False)
    placed.add_argument("model", type=Path)
    placed.add_argument("--parts", type=Path, help="the folder of the model's parts, where the model is missing")
    placed.add_argument("--batch", type=int, default=BATCH, help="prompts that are decoded at a time")
    placed.add_argument("--seconds", type=float, default=600.0, help="for everything")
    placed.add_argument("--device", default="cuda")
    placed.add_argument("--out", type=Path, required=True)
    completing = verbs.add_parser("complete", parents=[placed])
    completing.add_argument("--prompts", type=Path, required=True, help="prompts to complete")
    completing.set_defaults(run=only_complete)
    training = verbs.add_parser("train", parents=[placed])
    training.add_argument("--prompts", type=Path, help="prompts to complete")
    training.add_argument("--answers", type=Path, nargs="*", default=[], help="completions that are there already")
    training.add_argument("--method", default="streams", help="what is trained")
    training.add_argument("--recipe", help=f"default: the method's first, of streams {SHAPED}")
    training.add_argument("--set", type=setting, action="append", default=[], help="NAME=VALUE of the recipe")
    training.add_argument("--init", help="an adapter to start from, by its folder or its name")
    training.add_argument("--lr", type=float, help="learning rate")
    training.add_argument("--share", type=float, default=0.45, help="of the seconds in which completions are begun")
    training.add_argument("--evaluations", type=int, default=2, help="on the way")
    training.add_argument("--batch-tokens", type=int, default=8192, help="of a step; less for less memory")
    training.add_argument("--recompute", action="store_true", help="compute layers again for their gradients")
    training.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
