"""A toy that reads and writes text: byte-level tokens, random weights, an adapter; in memory and as folders."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from anabranch.adapters.folder import LoadedAdapter, TargetIdentity, save_adapter
from anabranch.api import Model
from anabranch.methods.streams.entry import METHOD
from anabranch.model.load import Target, load_target
from anabranch.model.weights import build_decoder, fingerprint
from small import LLAMA, RICH, decode, randomise, request, small_adapter

END = "<end>"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
# tokens of several letters; every other character is one token a byte, so most are cut between tokens
MERGED = ["th", "the", "Ġt", "Ġth", "Ġthe"]


def byte_tokenizer(*, template: bool = True) -> Any:
    """A byte-level BPE tokenizer of 263 tokens; the last is the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *MERGED, "Ã¼", END])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("Ã", "¼")]
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


VOCABULARY = 256 + len(MERGED) + 2
CONFIG = replace(LLAMA, vocab_size=VOCABULARY)


def toy_model(drafter: str = "streams", *, template: bool = True, eos: tuple[int, ...] = (VOCABULARY - 1,)) -> Model:
    """A ``Model`` with an adapter, in memory."""
    decoder = build_decoder(CONFIG, device="cpu")
    randomise(decoder, seed=1)
    config = replace(CONFIG, eos_token_ids=eos)
    target = Target(decoder, byte_tokenizer(template=template), config, "toy", None, fingerprint(decoder))
    return Model(target, (LoadedAdapter(small_adapter(decoder), {"sha256": "0" * 64}, METHOD),), drafter)


@dataclass(frozen=True)
class ToyFolders:
    """A model folder and two adapter folders: one of this model, one of another."""

    model: Path
    adapter: Path
    other: Path


def save_toys(where: Path, *, native: bool = False) -> ToyFolders:
    """Write them as a user would have them; ``native``: of sizes that the native kernels take."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64 if native else 32,
            intermediate_size=96 if native else 48,
            num_hidden_layers=3,
            num_attention_heads=2 if native else 4,
            num_key_value_heads=1 if native else 2,
            max_position_embeddings=96,
            bos_token_id=None,
            eos_token_id=VOCABULARY - 1,
            initializer_range=0.3,
        )
    )
    folders = ToyFolders(where / "model", where / "adapter", where / "other")
    model.save_pretrained(folders.model)
    byte_tokenizer().save_pretrained(folders.model)
    target = load_target(str(folders.model))
    identity = TargetIdentity.of(target, "toy")
    adapter = small_adapter(target.decoder, replace(RICH, conditioning_rank=32) if native else RICH)
    stranger = replace(identity, name="another", fingerprint="0" * 64)
    for folder, owner in ((folders.adapter, identity), (folders.other, stranger)):
        save_adapter(folder, adapter, method=METHOD, target=owner, training={}, measured={}, dtype=torch.float32)
    return folders


def train_toy(toys: ToyFolders, folder: Path, command: str, *options: object, count: int = 24) -> Result:
    """``anabranch train COMMAND --out FOLDER --json`` on the toy's own completions."""
    from anabranch.cli.train import app

    target = load_target(str(toys.model), dtype="float32")
    asked = [request(4 + n % 5, n, 20) for n in range(count)]
    said, _ = decode(target.decoder, asked)
    lines = [{"prompt_ids": a.prompt_ids, "answer_ids": s} for a, s in zip(asked, said, strict=True)]
    answers = folder.with_name("answers.jsonl")
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = (command, "--model", toys.model, "--answers", answers, "--out", folder, "--held-out", 4, "--json", *options)
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result
