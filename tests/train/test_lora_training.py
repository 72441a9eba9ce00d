"""Plain LoRA fine-tuning: the pass that is trained is the merged model's, and the result is a LoRA in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from anabranch.errors import CapabilityError, InputError
from anabranch.learning.examples import Batch, Example
from anabranch.learning.target import run_frozen
from anabranch.methods.lora import TRAINING, LoraConfig
from anabranch.methods.tuning import QUALITY, TunedObjective, tuned_pass
from anabranch.model.load import load_target
from anabranch.model.peft import WEIGHTS, write_lora
from anabranch.model.quantize import quantize_decoder
from anabranch.model.weights import build_decoder
from anabranch.native import library as native
from anabranch.train.lora import LoraLayers, fresh_lora, train_lora
from anabranch.train.trainer import Progress
from small import CASES, LLAMA, drawn_lora, merged_copy, prompt, small, train_on
from toy_text import ToyFolders
from verbs import Anabranch

EXAMPLES = [Example(tuple(prompt(4 + n % 5, n)), tuple(prompt(12, 40 + n % 3)), "ab"[n % 2], n) for n in range(12)]
BATCH = Batch.of(EXAMPLES[:3])
SMALL = {"rank": 4, "alpha": 8.0, "held_out": 3, "batch_tokens": 60, "warmup": 2, "epochs": 2, "lr": 0.01}


def inside(states_BTD: Tensor) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(states_BTD, BATCH.lengths_B.tolist(), strict=True)])


@pytest.mark.parametrize(("case", "chosen"), [("llama", ""), ("llama", "v_proj"), ("gpt2", ""), ("phi", "fc")])
def test_the_pass_that_is_trained_is_the_merged_models(case: str, chosen: str) -> None:
    target, lora = small(case), drawn_lora(CASES[case], chosen)
    module = LoraLayers(target.config, lora)
    found = tuned_pass(target, module.layers, BATCH.tokens_BT).hidden_BTD
    assert torch.allclose(inside(found), inside(run_frozen(merged_copy(target, lora), BATCH).hidden_BTD), atol=1e-4)
    assert not torch.allclose(inside(found), inside(run_frozen(target, BATCH).hidden_BTD), atol=1e-2)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in module.parameters())
    again = module.lora().terms
    assert all(torch.equal(term.delta(), lora.terms[name].delta()) for name, term in again.items())
    assert module.num_parameters() == lora.parameters()


def test_training_lowers_the_loss_and_the_target_stays() -> None:
    target = small()
    torch.manual_seed(0)
    module = LoraLayers(target.config, fresh_lora(target.config, LoraConfig(rank=4)))
    objective = TunedObjective(target, module.layers)
    before = objective.evaluate(EXAMPLES)[QUALITY]
    assert before == objective.untuned(EXAMPLES)
    losses = train_on(EXAMPLES, objective, module, steps=25, lr=1e-2)
    assert losses[0] == pytest.approx(before["loss"] * objective.predictions(Batch.of(EXAMPLES)), rel=1e-3)
    after = objective.evaluate(EXAMPLES)[QUALITY]
    assert after["loss"] < before["loss"] - 0.7
    assert after["accuracy"] > before["accuracy"]
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_the_target_may_be_quantised_while_it_is_tuned(form: str, toys: ToyFolders, tmp_path: Path) -> None:
    if form == "int8" and native.library() is None:
        pytest.skip(f"no native kernels: {native.why_not()}")
    stored, quantised = (load_target(str(toys.model), dtype="float32") for _ in range(2))
    plan = {**SMALL, "epochs": 4}
    record = train_lora(stored, TRAINING.recipe(None, plan), EXAMPLES, tmp_path / "stored", report=lambda now: None)
    reduced = TRAINING.recipe(None, {**plan, "target_format": form})
    near = train_lora(quantised, reduced, EXAMPLES, tmp_path / form, report=lambda now: None)
    assert near["base_fingerprint"] == record["base_fingerprint"]
    learned, wanted = (r["held_out"]["before"]["loss"] - r["held_out"]["after"]["loss"] for r in (near, record))
    assert wanted > 0.4
    assert learned == pytest.approx(wanted, rel=0.3)
    load_target(str(toys.model), lora=tmp_path / form)


def test_the_loss_is_the_completions_cross_entropy() -> None:
    target = small()
    module = LoraLayers(target.config, drawn_lora(LLAMA))
    logits = target.logits(run_frozen(merged_copy(target, drawn_lora(LLAMA)), BATCH).hidden_BTD)
    total, right, count = 0.0, 0, 0
    for row, example in enumerate(EXAMPLES[:3]):
        first, last = len(example.prompt_ids) - 1, len(example) - 1
        wanted = torch.tensor(example.answer_ids)
        total += float(torch.nn.functional.cross_entropy(logits[row, first:last], wanted, reduction="sum"))
        right += int((logits[row, first:last].argmax(-1) == wanted).sum())
        count += len(wanted)
    found = TunedObjective(target, module.layers).evaluate(EXAMPLES[:3])[QUALITY]
    assert found["loss"] == pytest.approx(total / count, abs=1e-3)
    assert found["accuracy"] == pytest.approx(right / count, abs=1e-4)


@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_a_run_that_was_stopped_resumes_to_the_same_terms(toys: ToyFolders, tmp_path: Path) -> None:
    target, plan = load_target(str(toys.model), dtype="float32"), TRAINING.recipe(None, SMALL)

    def stop(now: Progress) -> None:
        if now.step == 3:
            raise KeyboardInterrupt

    def ignore(now: Progress) -> None:
        pass

    with pytest.raises(KeyboardInterrupt):
        train_lora(target, plan, EXAMPLES, tmp_path / "stopped", report=stop)
    record = train_lora(target, plan, EXAMPLES, tmp_path / "stopped", report=ignore)
    train_lora(target, plan, EXAMPLES, tmp_path / "whole", report=ignore)
    mine, theirs = (load_file(tmp_path / name / WEIGHTS) for name in ("stopped", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert record["held_out"]["completions"] == 3
    assert "# LoRA for model" in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_from_completions_to_a_lora(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    lines = [{"prompt_ids": e.prompt_ids, "answer_ids": e.answer_ids, "source": e.source} for e in EXAMPLES]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    shared = ("--model", toys.model, "--answers", tmp_path / "a.jsonl", "--dtype", "float32", "--lr", 0.01)
    rest = (*shared, "--warmup", 2, "--held-out", 3, "--batch-tokens", 100)
    fresh = ("--rank", 4, "--modules", "q_proj, down_proj", "--licence", "a=MIT", "--epochs", 6)
    done = anabranch("train", "lora", "--out", tmp_path / "one", *rest, *fresh)
    assert done.code == 0, done.err
    assert "held-out rows" in done.out
    assert "untuned model" in done.out
    record = json.loads((tmp_path / "one" / "training.json").read_text())
    assert record["terms"] == {"ranks": "4", "scales": "8", "modules": "down_proj, q_proj"}
    assert record["held_out"]["after"]["loss"] < record["held_out"]["before"]["loss"]
    assert [part["licence"] for part in record["data"]] == ["MIT", ""]
    assert record["base_fingerprint"] == load_target(str(toys.model)).fingerprint
    done = anabranch("train", "lora", "--out", tmp_path / "one", *rest, *fresh, "--force")
    assert done.code == 0, done.err
    assert "resumes from step" in done.err
    done = anabranch("train", "lora", "--out", tmp_path / "two", *rest, "--init", tmp_path / "one", "--json")
    assert done.code == 0, done.err
    again = json.loads(done.out)
    assert again["held_out"]["before"] == record["held_out"]["before"]
    assert (again["terms"], again["init"]) == (record["terms"], "one")
    call = ("generate", "the", "--raw", "--model", toys.model, "--drafter", "none", "-n", 8, "--json")
    plain, tuned = (json.loads(anabranch(*call, *more).out) for more in ((), ("--lora", tmp_path / "two")))
    assert plain["token_ids"] != tuned["token_ids"]
    assert "4" in anabranch("info", tmp_path / "two").out


@pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
def test_a_task_of_ones_own(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    rows = [{"q": f"the {n} of the", "a": f"the {n % 3}"} for n in range(60)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = ("--task", tmp_path / "own.jsonl", "--prompt-template", "Say {q}", "--completion", "a", "--raw")
    where = ("--model", toys.model, "--out", tmp_path / "out", "--dtype", "float32")
    done = anabranch("train", "lora", *where, *task, "--epochs", 1, "--held-out", 2, "--accumulate", 2, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["examples"] + record["held_out"]["completions"] < 60  # the rows of the split test are left alone
    assert anabranch("train", "lora", *where, *task, "--text", tmp_path / "own.jsonl").code == 1


def test_refusals(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt_ids": [1], "answer_ids": [2, 3]}) + "\n")
    write_lora(tmp_path / "lora", drawn_lora(load_target(str(toys.model)).config), base="")
    data = ("--model", toys.model, "--answers", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--held-out", 0)

    def refused(*arguments: object) -> str:
        done = anabranch("train", "lora", *arguments)
        assert (done.code, done.err.count("error:")) == (1, 1)
        return done.err.splitlines()[-1]

    assert "give either a file of completions" in refused("--out", tmp_path / "out")
    assert "there is no file" in refused("--out", tmp_path / "out", "--answers", tmp_path / "b.jsonl")
    assert "has its own rank, alpha and modules; leave out --rank" in refused(
        *data, "--init", tmp_path / "lora", "--rank", 2
    )
    assert "it is an adapter of anabranch" in refused(*data, "--init", toys.adapter)
    assert "use --init" in refused(*data, "--lora", tmp_path / "lora")
    assert "no linear module 'c_attn'; give some of q_proj" in refused(*data, "--modules", "c_attn")
    assert "rank must be a whole number from 1 to 1024, got 0" in refused(*data, "--rank", 0)
    assert "alpha must be greater than 0, got -1" in refused(*data, "--alpha", -1)
    assert "contains a finished adapter" in refused(*data[:4], "--out", tmp_path / "lora")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_tuned(tmp_path: Path, toys: ToyFolders) -> None:
    narrow = build_decoder(LLAMA, device="cpu")
    quantize_decoder(narrow, "int8")
    with pytest.raises(CapabilityError, match="a quantised target cannot be tuned"):
        TunedObjective(narrow, LoraLayers(LLAMA, drawn_lora(LLAMA)).layers)
    write_lora(tmp_path, drawn_lora(load_target(str(toys.model)).config), base="")
    tuned = load_target(str(toys.model), lora=tmp_path)
    with pytest.raises(CapabilityError, match="continue the training of a LoRA with --init"):
        train_lora(tuned, TRAINING.recipe(None, SMALL), EXAMPLES, tmp_path / "out", report=lambda now: None)
    with pytest.raises(InputError, match="there is no option 'depth'"):
        TRAINING.recipe(None, {"depth": 1})
