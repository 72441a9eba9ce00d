"""Train streams for a Qwen2 GGUF on a GPU that is lent for minutes: completions of prepared prompts, then the adapter.

Two hundred thousand tokens take half a minute, since transformers decodes a thousand prompts at a time; the scheduler
of this package decoded 2,354 tokens a second with 256 rows on an H200. Then training takes the seconds that are left.

    python research/build_prompts.py --data DIR --out asked.jsonl
    python research/build_code_prompts.py --count 3600 --out code.jsonl
    python research/train_on_gpu.py prepare MODEL.gguf asked.jsonl code.jsonl --out prompts.jsonl
    python research/train_on_gpu.py split MODEL.gguf --megabytes 60 --out PARTS
    python research/train_on_gpu.py train MODEL.gguf prompts.jsonl --seconds 190 --out ADAPTER

``prepare`` renders prompts as token ids on any machine, so that a lent one needs neither templates nor data. ``split``
cuts a model into files that a narrow transfer takes; ``train`` puts MODEL.gguf together where it is missing and
``--parts`` has them. It writes ADAPTER.answers.jsonl, with which ``anabranch train streams --answers`` goes on
anywhere. docs/gpu.md says what the sizes need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from anabranch.model.decoder import Decoder
from anabranch.model.load import load_target
from anabranch.prompts import chat_ids
from anabranch.support.jsonfiles import read_rows
from anabranch.train import read_data, train_adapter, trainable
from anabranch.train.trainer import Progress

LONGEST = 640  # tokens of a prompt
BATCH = 1024  # prompts decoded at a time
NEW = 320  # tokens of a completion, at most
PROBE = 8  # steps that are timed to fit the epochs into the seconds that are left
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
STEPS = {"segment": 2048, "lr": 2e-3, "held_out": 24, "evaluate_every": 10**6}
LICENCES = {
    "code tasks": "CC0-1.0",
    "oasst1_en": "Apache-2.0",
    "self_instruct_seed": "Apache-2.0",
    "gsm8k": "MIT",
    "sql_create_context": "CC BY 4.0",
    "wikitext2": "CC BY-SA 3.0",
    "e2e_nlg": "CC BY-SA 4.0",
    "gutenberg": "public domain",
}
# prompts of each source, at most
MOST = {"wikitext2": 900, "gutenberg": 200}


def prepare(args: argparse.Namespace) -> None:
    """Render prompts as token ids, in random order."""
    target, rng = load_target(args.model), random.Random(0)
    rows = [row for path in args.prompts for row in read_rows(path)]
    rng.shuffle(rows)
    kept, counts = [], dict[str, int]()
    for number, row in enumerate(rows):
        source = row["source"]
        ids = chat_ids(target.tokenizer, row["prompt"], raw=not row.get("chat", True), model=target.name)
        if len(ids) <= LONGEST and counts.get(source, 0) < MOST.get(source, len(rows)):
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


def in_transformers(decoder: Decoder) -> Any:
    """The same weights as a model of transformers; they are shared, not copied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config, state = decoder.config, decoder.state_dict()
    theirs = Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        rope_theta=config.rope.theta,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(theirs)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {
        "model.embed_tokens.weight": state["embedding.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": state["head.weight"],
    }
    for layer in range(config.num_layers):
        ours, name = f"blocks.{layer}.", f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = state[f"{ours}qkv.{kind}"].split([queries, keys, keys])
            weights |= {f"{name}self_attn.{which}_proj.{kind}": part for which, part in zip("qkv", parts, strict=True)}
        gate, up = state[f"{ours}mlp.up.weight"].chunk(2)
        weights |= {
            f"{name}self_attn.o_proj.weight": state[f"{ours}out.weight"],
            f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up,
            f"{name}mlp.down_proj.weight": state[f"{ours}mlp.down.weight"],
            f"{name}input_layernorm.weight": state[f"{ours}norm_in.weight"],
            f"{name}post_attention_layernorm.weight": state[f"{ours}norm_mlp.weight"],
        }
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = Qwen2RotaryEmbedding(theirs).to(decoder.device)
    return model.eval()


@torch.inference_mode()
def complete(decoder: Decoder, prompts: Path, out: Path, until: float, batch: int) -> None:
    """Greedy completions, a batch at a time, the last one begun before ``until``."""
    rows = sorted(read_rows(prompts), key=lambda row: len(row["prompt_ids"]))
    groups = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    random.Random(1).shuffle(groups)
    model, ends = in_transformers(decoder), list(decoder.config.eos_token_ids)
    with out.open("w", encoding="utf-8") as file:
        for group in groups:
            if time.monotonic() > until:
                break
            width = max(len(row["prompt_ids"]) for row in group)
            short = [width - len(row["prompt_ids"]) for row in group]
            ids = [[ends[-1]] * pad + row["prompt_ids"] for pad, row in zip(short, group, strict=True)]
            mask = [[0] * pad + [1] * (width - pad) for pad in short]
            made = model.generate(
                torch.tensor(ids, device=decoder.device),
                attention_mask=torch.tensor(mask, device=decoder.device),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[-1],
            )
            for row, answer in zip(group, made[:, width:].tolist(), strict=True):
                end = next((place for place, token in enumerate(answer, 1) if token in ends), len(answer))
                file.write(json.dumps({**row, "answer_ids": answer[:end]}) + "\n")
            print(f"{len(group)} prompts of up to {width} tokens completed", flush=True)


class _TimedError(Exception):
    """Enough steps were timed."""


def train(args: argparse.Namespace) -> None:
    """Complete prompts for ``--share`` of the time, and train in the rest."""
    began = time.monotonic()
    if not args.model.exists() and args.parts is not None:
        join(args.model, args.parts)
    target, answers = load_target(args.model, device=args.device), args.out.with_suffix(".answers.jsonl")
    print(f"{time.monotonic() - began:.0f} s: loaded", flush=True)
    complete(target.decoder, args.prompts, answers, began + args.share * args.seconds, args.batch)
    shape = SHAPES.get(target.decoder.config.hidden_size, SHAPES[896])
    steps = {**STEPS, "batch_tokens": args.batch_tokens, "recompute": args.recompute}
    method = trainable("streams")
    assert method.trained is not None
    marks: list[float] = []

    def timed(progress: Progress) -> None:
        marks.append(time.monotonic())
        if progress.step >= PROBE:
            raise _TimedError(progress.steps)

    def told(progress: Progress) -> None:
        if progress.step % 20 == 0 or progress.step == progress.steps:
            print(f"step {progress.step}/{progress.steps}, loss {progress.loss:.3f}, {progress.accuracy}", flush=True)

    epochs = 1.0
    for report, folder in ((timed, args.out.with_suffix(".probe")), (told, args.out)):
        recipe = method.trained.recipe("default-adapter", {**shape, **steps, "epochs": epochs})
        examples = read_data(target, recipe, answers=answers)
        try:
            record = train_adapter(
                target, method, recipe, examples, folder, report=report, resume=False, licences=LICENCES,
                command=f"python research/train_on_gpu.py train {args.model.name} {args.prompts.name}",
            )  # fmt: skip
        except _TimedError as timing:
            step = statistics.median(after - before for before, after in pairwise(marks[2:]))
            left = args.seconds - (time.monotonic() - began) - RESERVE
            epochs = round(max(0.05, left / step / timing.args[0]), 2)
            print(f"{step:.3f} s a step, {epochs} epochs of {timing.args[0]} steps", flush=True)
            continue
        print(json.dumps({name: record[name] for name in ("parameters", "bytes", "measured")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(required=True)
    preparing = verbs.add_parser("prepare")
    preparing.add_argument("model", type=Path)
    preparing.add_argument("prompts", type=Path, nargs="+")
    preparing.add_argument("--out", type=Path, required=True)
    preparing.set_defaults(run=prepare)
    splitting = verbs.add_parser("split")
    splitting.add_argument("model", type=Path)
    splitting.add_argument("--megabytes", type=int, default=60, help="of a part, at most")
    splitting.add_argument("--out", type=Path, required=True)
    splitting.set_defaults(run=split)
    training = verbs.add_parser("train")
    training.add_argument("model", type=Path)
    training.add_argument("prompts", type=Path)
    training.add_argument("--seconds", type=float, default=600.0, help="for everything")
    training.add_argument("--share", type=float, default=0.45, help="of the seconds in which completions are begun")
    training.add_argument("--parts", type=Path, help="the folder of the model's parts, where the model is missing")
    training.add_argument("--batch", type=int, default=BATCH, help="prompts that are decoded at a time")
    training.add_argument("--batch-tokens", type=int, default=8192, help="of a step; less for less memory")
    training.add_argument("--recompute", action="store_true", help="compute layers again for their gradients")
    training.add_argument("--device", default="cuda")
    training.add_argument("--out", type=Path, required=True)
    training.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
