"""``anabranch generate`` as a user types it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from terminals import PROGRAM, Terminal

from anabranch.adapters.folder import TargetIdentity, save_adapter
from anabranch.api import Model
from anabranch.methods.medusa import entry as medusa
from anabranch.methods.medusa.module import MedusaConfig, MedusaModule
from anabranch.model.load import load_target
from small import randomise
from toy_text import ToyFolders
from verbs import Anabranch


def answer(model: Model, text: str, **options: Any) -> Any:
    return model.chat([{"role": "user", "content": text}], **options)


def test_generate_answers_through_the_template(anabranch: Anabranch, where: list[object], model: Model) -> None:
    expected = answer(model, "the thing", max_new_tokens=12)
    done = anabranch("generate", *where, "the thing", "--max-new-tokens", 12)
    assert done.code == 0
    assert done.out == expected.text + "\n"
    facts = done.err.rstrip().split("; ")
    assert facts[0].startswith(f"{expected.stats.tokens} tokens, ")
    assert facts[1].startswith(f"prompt {len(expected.prompt_ids)} tokens, ")
    length = expected.stats.mean_acceptance_length
    assert facts[2] == f"mean acceptance length {length:.2f} per target pass"
    assert facts[3].startswith(f"{expected.stats.steps} target passes")
    assert facts[4].startswith("drafter streams:tree=")
    assert facts[-2:] == ["kernels torch ('anabranch info' tells why)", "ended by the model"]
    assert done.err.count("\n") == 1


def test_generate_raw_continues_the_text_of_standard_input(
    anabranch: Anabranch, where: list[object], model: Model
) -> None:
    done = anabranch("generate", *where, "-", "--raw", "--max-new-tokens", 8, "--drafter", "none", stdin="the thing")
    assert done.out == model.generate("the thing", max_new_tokens=8).text + "\n"
    assert "mean acceptance length 1.00 per target pass; 8 target passes; drafter" in done.err


def test_generate_json(anabranch: Anabranch, where: list[object], model: Model) -> None:
    options = ("--max-new-tokens", 12, "--temperature", 1, "--top-k", 9, "--seed", 5, "--show-drafts", "--compare")
    drafter = "streams:nodes=6"  # "auto" follows the load, and so do its sources
    done = anabranch("generate", *where, "the thing", "--json", "--drafter", drafter, *options)
    record = json.loads(done.out)
    expected = answer(model, "the thing", max_new_tokens=12, temperature=1.0, top_k=9, seed=5, drafter=drafter)
    assert record["token_ids"] == expected.token_ids
    assert record["text"] == expected.text
    assert record["finish_reason"] == expected.finish_reason
    assert record["sources"] == expected.sources
    assert record["ended"] == "max_new_tokens"
    assert record["kernels"]["name"] == "torch"
    assert record["prompt_tokens"] == len(expected.prompt_ids)
    assert record["drafter"] == drafter
    assert "multiples of 32" in record["kernels"]["why"]
    assert record["stats"]["tokens"] == 12
    assert record["stats"]["decode_tokens_per_second"] > record["stats"]["tokens_per_second"]
    assert record["compare"]["equal"] is True
    assert record["compare"]["speedup"] > 0
    assert done.err == ""


def test_show_drafts_marks_every_source(anabranch: Anabranch, where: list[object], model: Model) -> None:
    drafter = "streams+prompt_lookup"
    options = {"max_new_tokens": 40, "ignore_eos": False}
    expected = answer(model, "the the the", drafter=drafter, **options)
    done = anabranch("generate", *where, "the the the", "--max-new-tokens", 40, "--drafter", drafter, "--show-drafts")
    legend, line = done.err.splitlines()
    assert legend.startswith(f"proposed by: target {expected.stats.sources['target']}")
    for source, count in expected.stats.sources.items():
        assert any(word.startswith(source) and word.endswith(f" {count}") for word in legend[13:].split(", "))
    assert "tokens/s" in line
    unmarked = "".join(character for character in done.out if character not in "⁰¹²³⁴⁵⁶⁷⁸⁹ᵖ")
    assert unmarked == expected.text + "\n"


def test_compare_measures_both_ways(anabranch: Anabranch, where: list[object]) -> None:
    done = anabranch("generate", *where, "the thing", "--max-new-tokens", 8, "--compare")
    assert "; speedup " in done.err
    assert "x over plain decoding (" in done.err
    assert "same tokens" in done.err
    refused = anabranch("generate", *where, "the thing", "--drafter", "none", "--compare")
    assert refused.code == 1
    assert "other drafter" in refused.err or "another drafter" in refused.err


@pytest.mark.thorough
def test_a_real_run_into_a_pipe_that_closes(toys: ToyFolders) -> None:
    command = [*PROGRAM, "generate", "the thing", "--model", str(toys.model), "--drafter", "none", "--raw"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cut:
        cut.stdout.close()
        said = cut.stderr.read()
        assert b"Traceback" not in said
        assert b"error: " not in said, "not refused before it wrote"


def test_why_a_text_ended(anabranch: Anabranch, where: list[object], model: Model) -> None:
    command = ("generate", "the thing", "--raw", *where)
    text = model.generate("the thing", max_new_tokens=12).text
    stop = next(text[i] for i in range(3, len(text)) if text[i] != "\ufffd")
    assert "ended before a stop string\n" in anabranch(*command, "--stop", stop).err
    assert "stopped at 3 tokens; --max-new-tokens for more\n" in anabranch(*command, "-n", 3).err
    assert "the model's limit of 96 tokens is reached\n" in anabranch(*command).err
    ending = next(seed for seed in range(99) if _stops(model, seed))
    done = anabranch(*command, "--temperature", 2, "--seed", ending)
    assert "ended by the model\n" in done.err


def _stops(model: Model, seed: int) -> bool:
    return bool(model.generate("the thing", temperature=2.0, seed=seed).finish_reason == "stop")


def test_a_system_message_goes_first(anabranch: Anabranch, where: list[object], model: Model) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "the"}]
    done = anabranch("generate", "the", *where, "--system", "a", "-n", 6)
    assert done.out == model.chat(messages, max_new_tokens=6).text + "\n"
    refused = anabranch("generate", "the", *where, "--system", "a", "--raw")
    assert (refused.code, "--system needs the chat template" in refused.err) == (1, True)


def test_sampling_options_reach_the_model(anabranch: Anabranch, where: list[object], model: Model) -> None:
    options = {"min_p": 0.3, "repetition_penalty": 1.5, "temperature": 2.0, "max_new_tokens": 9}
    done = anabranch(
        "generate", "the the", "--raw", *where, "--min-p", 0.3, "--repetition-penalty", 1.5, "--temperature", 2, "-n", 9
    )
    assert done.out == model.generate("the the", **options).text + "\n"
    assert done.out != model.generate("the the", temperature=2.0, max_new_tokens=9).text + "\n"
    assert "threads must be" in anabranch("generate", "the", *where, "--threads", 0).err


def test_standard_input_must_be_utf_8(anabranch: Anabranch) -> None:
    done = anabranch("generate", "-", "--model", "nowhere", stdin="fünf ".encode() + b"\xff more")
    assert done.code == 1
    assert done.err.startswith("error: standard input is not valid UTF-8: byte 0xff at offset 6; ")
    assert done.err.count("\n") == 1


def test_a_real_pipe_of_invalid_utf_8_is_refused() -> None:
    done = subprocess.run([*PROGRAM, "generate", "-"], input=b"caf\xe9", capture_output=True, check=False, timeout=300)
    assert done.returncode == 1
    assert b"byte 0xe9 at offset 3" in done.stderr
    assert done.stdout == b""


def test_a_trace_is_checked_before_a_model_is_loaded(anabranch: Anabranch, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("an earlier one")
    command = ("generate", "the", "--model", tmp_path / "nowhere", "--trace")
    done = anabranch(*command, trace)
    assert "trace.jsonl exists already; give another --trace, or --force to replace it" in done.err
    assert "the trace cannot be written to" in anabranch(*command, trace / "below.jsonl").err
    assert "there is no folder" in anabranch(*command, trace, "--force").err
    assert trace.read_text() == "an earlier one"


def test_force_replaces_a_trace(anabranch: Anabranch, where: list[object], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("an earlier one")
    done = anabranch("generate", "the", *where, "-n", 4, "--min-p", 0.1, "--trace", trace, "--force")
    assert done.code == 0, done.err
    header, *steps = map(json.loads, trace.read_text().splitlines())
    assert header["settings"]["min_p"] == 0.1
    assert "on_prompt" not in header["settings"]
    assert steps


@pytest.mark.thorough
def test_control_characters_stay_out_of_a_terminal(anabranch: Anabranch, where: list[object], model: Model) -> None:
    """The toy speaks in random bytes. A terminal gets them spelled out, a pipe gets them as they are."""
    controls = {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}
    seed = next(seed for seed in range(99) if controls & set(_raw(model, seed)))
    command = ["generate", "the", "--raw", *where, "--temperature", "3", "--seed", seed]
    assert anabranch(*command).out == _raw(model, seed) + "\n"
    with Terminal(command, columns=60) as terminal:
        shown = terminal.ended()
    assert terminal.code == 0
    assert r"\x" in shown
    assert not controls & set(shown.replace("\r", ""))
    lines = shown.splitlines()
    summary = lines[next(i for i, line in enumerate(lines) if "mean acceptance length" in line) :]
    assert max(map(len, summary)) <= 60, summary


def _raw(model: Model, seed: int) -> str:
    return str(model.generate("the", temperature=3.0, seed=seed).text)


def test_the_adapter_that_was_chosen_is_named_and_remembered(
    anabranch: Anabranch, toys: ToyFolders, where: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    target = load_target(str(toys.model))
    heads = MedusaModule(target.config, MedusaConfig(num_heads=2))
    randomise(heads, seed=3)
    folder, identity = tmp_path / "heads", TargetIdentity.of(target, "toy")
    save_adapter(folder, heads, method=medusa.METHOD, target=identity, training={}, measured={})
    both = [*where, "--adapter", folder, "the thing", "--max-new-tokens", 12]
    done = anabranch("generate", *both, "--json", "--compare")
    assert done.code == 0, done.err
    first = json.loads(done.out)
    choices = [f"{name}+prompt_lookup:tokens=auto" for name in ("streams:tree=auto,copy=yes", "medusa:tree=auto")]
    assert first["drafter"] in choices
    assert first["compare"]["equal"]
    (path,) = (tmp_path / "home" / "yields").iterdir()
    kept = json.loads(path.read_text())["yields"]["1"]
    assert kept[first["drafter"]][0] > 0
    again = anabranch("generate", *both)
    assert any(f"drafter {each};" in again.err for each in choices)
    later = json.loads(path.read_text())["yields"]["1"]
    assert sum(tokens for tokens, _ in later.values()) > sum(tokens for tokens, _ in kept.values())


def test_several_samples(anabranch: Anabranch, where: list[object], model: Model) -> None:
    command = ("generate", *where, "the thing", "--drafter", "none", "-n", 6, "--temperature", 1)
    expected = [answer(model, "the thing", max_new_tokens=6, temperature=1.0, seed=seed) for seed in (3, 4, 9, 10)]
    done = anabranch(*command, "--n", 2, "--seed", 3, "--seed", 9)
    assert done.out == "".join(f"{each.text}\n" for each in expected)
    assert [line.split(":")[0] for line in done.err.splitlines()[:-1]] == ["seed 3", "seed 4", "seed 9", "seed 10"]
    assert done.err.splitlines()[-1].startswith(f"{sum(len(each.token_ids) for each in expected)} tokens, ")
    samples = json.loads(anabranch(*command, "--n", 2, "--seed", 3, "--seed", 9, "--json").out)["samples"]
    assert [(each["seed"], each["token_ids"]) for each in samples] == [
        (seed, each.token_ids) for seed, each in zip((3, 4, 9, 10), expected, strict=True)
    ]
    for words, said in (
        (("--compare",), "--compare is for a single sample"),
        (("--json", "--stream"), "--stream is for a single sample"),
        (("--temperature", 0), "2 samples are all the same at temperature 0"),
    ):
        refused = anabranch(*command, "--n", 2, *words)
        assert refused.code == 1
        assert said in refused.err
    assert "n must be a whole number of at least 1, got 0" in anabranch(*command, "--n", 0).err


def test_top_log_probs(anabranch: Anabranch, where: list[object], model: Model) -> None:
    command = ("generate", *where, "the thing", "--raw", "--drafter", "none", "-n", 3, "--top-log-probs", 2)
    expected = model.generate("the thing", max_new_tokens=3, top_log_probs=2, drafter="none").top_log_probs
    assert expected is not None
    places = json.loads(anabranch(*command, "--json").out)["top_log_probs"]
    assert [{token: pytest.approx(value, abs=1e-4) for token, value in place} for place in places] == expected
    *chunks, last = map(json.loads, anabranch(*command, "--json", "--stream").out.splitlines())
    assert [place for chunk in chunks for place in chunk["top_log_probs"]] == last["result"]["top_log_probs"] == places
    assert "--top-log-probs needs --json" in anabranch(*command).err


def test_a_conversation_is_answered(anabranch: Anabranch, where: list[object], model: Model, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "thing"}]
    messages.append({"role": "user", "content": "one two"})
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(messages))
    command = ("generate", *where, "-n", 6, "--messages")
    expected = model.chat([{"role": "system", "content": "the"}, *messages], max_new_tokens=6).text
    assert anabranch(*command, path, "--system", "the").out == f"{expected}\n"
    assert (
        anabranch(*command, "-", stdin=json.dumps(messages)).out == f"{model.chat(messages, max_new_tokens=6).text}\n"
    )
    for text, said in (
        ("[", "is not JSON"),
        ('{"role": "user"}', "a conversation must be a list of messages"),
        ("[3]", "a message must be a dictionary"),
    ):
        path.write_text(text)
        assert said in anabranch(*command, path).err
    assert "give either" in anabranch(*command, path, "text").err
    assert "--messages needs the chat template" in anabranch(*command, path, "--raw").err


@pytest.mark.parametrize("more", [(), ("--every-position",)])
def test_a_trace_names_the_rule_that_verified(
    anabranch: Anabranch, where: list[object], tmp_path: Path, more: tuple[str, ...]
) -> None:
    drafter = ("--drafter", "streams:tree=chain", "--rule", "rejection", "--temperature", 1)
    anabranch("generate", *where, "the thing", "-n", 4, *drafter, "--trace", tmp_path / "trace.jsonl", *more)
    assert json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[0])["rule"] == "rejection"
