"""Train a small T5 and a smaller one with the same vocabulary, for the study ``leviathan_t5``.

    python research/train_t5.py T5 --data DIR --minutes 170
    anabranch train ngram --model T5/target --text T5/train.txt --out T5/ngrams

Both learn two tasks, as the paper's T5 did many: restaurant descriptions (e2e_nlg) and translation (wmt16_en_ro; its
validation set is all there is to train on, so translations are poor). The vocabulary is a byte-level BPE of the
training text. A run that ended early goes on from its last checkpoint when it is started again. T5/e2e.jsonl and
T5/wmt.jsonl are the prompts of the study, from the test sets.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WORDS, PAD, END = 8192, 0, 1
BATCH, RATE, WARM, EVERY = 32, 1e-3, 200, 200  # pairs a step; peak rate; steps of warming up; steps between checkpoints
LONGEST = 128  # tokens of a source or text; the rest is cut
SHARES = {"draft": 0.15, "target": 0.85}  # of the minutes
SIZES: dict[str, dict[str, int]] = {
    "target": {"d_model": 384, "d_kv": 64, "num_heads": 6, "d_ff": 1536, "num_layers": 6},
    "draft": {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 512, "num_layers": 2},
}
STATE = ("exp_avg", "exp_avg_sq")  # of Adam


@dataclass(frozen=True)
class Pair:
    """A source and a text about it."""

    source: str
    text: str


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def described(row: dict[str, Any], text: str) -> Pair:
    return Pair(f"describe: {row['meaning_representation']}", text)


def translated(row: dict[str, Any]) -> Pair:
    return Pair(f"translate English to Romanian: {row['en']}", row["ro"])


def training_pairs(data: Path) -> list[Pair]:
    described_rows = [described(row, row["human_reference"]) for row in rows(data / "e2e_nlg/train.jsonl.gz")]
    return described_rows + 4 * [translated(row) for row in rows(data / "wmt16_en_ro/validation.jsonl.gz")]


def tokenizer_of(folder: Path, pairs: Sequence[Pair]) -> Any:
    """The tokenizer in ``folder``, made of the pairs if there is none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    path = folder / "vocabulary.json"
    if not path.exists():
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
        core.train_from_iterator((each for pair in pairs for each in (pair.source, pair.text)), trainer)
        core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
        core.save(str(path))
    core = Tokenizer.from_file(str(path))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def padded(texts: Sequence[list[int]]) -> Tensor:
    width = max(map(len, texts))
    return torch.tensor([[*ids, *[PAD] * (width - len(ids))] for ids in texts])


class Run:
    """The training of one model, step by step; ``folder`` has its state after every ``EVERY`` steps."""

    def __init__(self, folder: Path, sizes: dict[str, int], words: int, device: str) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        ends = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
        config = T5Config(vocab_size=words, dropout_rate=0.1, **sizes, **ends)
        self.folder, self.step, self.device = folder, 0, device
        self.model = T5ForConditionalGeneration(config).to(device).train()
        self.seconds = 0.0  # of all starts
        self.names = dict(self.model.named_parameters())
        self.adam = torch.optim.AdamW(self.names.values(), lr=RATE, weight_decay=0.01)
        if (folder / "state.safetensors").exists():
            self._resume()

    def _resume(self) -> None:
        stored = load_file(self.folder / "state.safetensors")
        self.step, self.seconds = int(stored["step"]), float(stored["seconds"])
        with torch.no_grad():
            for name, parameter in self.names.items():
                parameter.copy_(stored[name])
                state = {kind: stored[f"{name}.{kind}"].to(parameter.device) for kind in STATE}
                self.adam.state[parameter] = {"step": torch.tensor(float(self.step)), **state}

    def save(self) -> None:
        """Write the state as a whole or not at all."""
        kept: dict[str, Tensor] = {"step": torch.tensor(self.step), "seconds": torch.tensor(self.seconds)}
        for name, parameter in self.names.items():
            kept[name] = parameter.detach().clone()
            kept |= {f"{name}.{kind}": self.adam.state[parameter][kind] for kind in STATE}
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(kept, self.folder / "state.new")
        os.replace(self.folder / "state.new", self.folder / "state.safetensors")

    def one(self, sources: Tensor, texts: Tensor, rate: float) -> float:
        """A step; returns the loss of a token."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        sources, texts = sources.to(self.device), texts.to(self.device)
        labels = texts.masked_fill(texts == PAD, -100)
        loss = self.model(input_ids=sources, attention_mask=(sources != PAD).long(), labels=labels).loss
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.names.values(), 1.0)
        self.adam.step()
        self.step += 1
        return float(loss.detach())


def train(run: Run, encoded: Sequence[tuple[list[int], list[int]]], steps: int, seconds: float) -> None:
    """Train up to step ``steps``, or for so long; the rate falls to zero with whichever ends first."""
    while (spent := max(run.seconds / seconds, run.step / steps)) < 1:
        began = time.monotonic()
        epoch, place = divmod(run.step * BATCH, len(encoded) - BATCH)
        order = np.random.default_rng(epoch).permutation(len(encoded))[place : place + BATCH]
        sources, texts = (padded([encoded[i][side] for i in order]) for side in (0, 1))
        loss = run.one(sources, texts, RATE * min(run.step / WARM, 1 - spent))
        run.seconds += time.monotonic() - began
        if run.step % EVERY == 0:
            run.save()
            print(f"{run.folder.name}: step {run.step:,}, loss {loss:.3f}, {run.seconds / 60:.1f} minutes", flush=True)
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of everything that is written")
    parser.add_argument("--data", type=Path, required=True, help="folder with e2e_nlg and wmt16_en_ro")
    parser.add_argument("--minutes", type=float, default=170.0, help="of both trainings together")
    parser.add_argument("--steps", type=int, default=20_000, help="of each training at most")
    parser.add_argument("--device", default="cpu", help="cuda: train on a GPU, where seven minutes are enough")
    parser.add_argument("--limit", type=int, help="train on so many pairs, for a trial")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = training_pairs(args.data)
    tokenizer = tokenizer_of(args.out, pairs)
    pairs = pairs[: args.limit]
    (args.out / "train.txt").write_text("\n".join(pair.text for pair in pairs), encoding="utf-8")
    tests = {
        "e2e": [described(row, "") for row in rows(args.data / "e2e_nlg/test.jsonl.gz")],
        "wmt": [translated(row) for row in rows(args.data / "wmt16_en_ro/test.jsonl.gz")],
    }
    for name, those in tests.items():
        lines = (json.dumps({"prompt": pair.source}, ensure_ascii=False) + "\n" for pair in those)
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    encoded = [tuple(tokenizer(text).input_ids[:LONGEST] for text in (pair.source, pair.text)) for pair in pairs]
    for name, share in SHARES.items():
        run = Run(args.out / "runs" / name, SIZES[name], len(tokenizer), args.device)
        train(run, encoded, args.steps, 60 * args.minutes * share)
        run.model.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)


if __name__ == "__main__":
    main()
