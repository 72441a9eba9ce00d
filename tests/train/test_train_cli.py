"""``anabranch train`` from prompts to an adapter folder that decodes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from anabranch.adapters import folder
from anabranch.adapters.folder import load_adapter
from anabranch.cli.configured import recipe_rows
from anabranch.cli.train import app
from anabranch.errors import AnabranchError, FileError, InputError, TrainingWarning
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.entry import METHOD, TRAINED
from anabranch.methods.streams.recipes import TRAINING, StreamConfig
from anabranch.model import load
from anabranch.support.appended import settings_path
from anabranch.train.job import adopted, start_folder
from anabranch.train.trainer import Trainer
from small import as_target, decode, prompt, request, small
from toy_text import ToyFolders

pytestmark = pytest.mark.filterwarnings("ignore::anabranch.errors.TrainingWarning")
TARGET = as_target(small(), name="default")


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: TARGET)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Answers of the toy, by the command."""
    lines = [{"prompt": " ".join(f"w{i}" for i in prompt(2 + n % 5, n)), "source": f"s{n % 2}"} for n in range(30)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    out = tmp_path / "a.jsonl"
    result = call("answers", "--prompts", tmp_path / "p.jsonl", "--out", out, "--max-new-tokens", 12, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["answers"] == 30
    return out


SHAPE = ("--stream-layers", 2, "--conditioning", "path")
SMALL = ("--recipe", "small", "--batch-tokens", 120, "--held-out", 4, *SHAPE, "--no-timing")


LENGTH = "predicted mean acceptance length"


def test_from_prompts_to_an_adapter_that_decodes(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    arguments = ("streams", "--answers", written, "--out", folder, *SMALL, "--epochs", 2, "--draft-vocabulary", 9)
    result = call(*arguments, "--licence", "s0=CC0-1.0", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    run = record.pop("run")
    assert run["command"] == f'anabranch generate "..." --adapter {folder}'
    assert set(run["predicted"]) == {"none", "chain", "4 nodes", "8 nodes", "tree", "tree without conditioning"}
    assert run["predicted"]["none"] == 1.0
    assert run["predicted"]["tree"] == record["measured"][LENGTH]["tree"]
    steps, lengths = zip(*run["curve"], strict=True)
    assert steps[-1] == record["training"]["steps"]
    assert lengths[-1] == run["predicted"]["tree"]
    assert run["next"]
    assert record["training"]["seconds"] >= 0
    assert len(record["training"]["data_sha256"]) == 64
    loaded = load_adapter(folder, TARGET)
    assert loaded.record == record
    assert record["draft_vocabulary"] == 9
    assert record["config"]["num_stream_layers"] == 2
    assert record["config"]["conditioning"] == "path"
    assert record["training"]["data"][0]["licence"] == "CC0-1.0"
    measured = record["measured"]
    lengths = measured["predicted mean acceptance length"]
    assert set(lengths) == {"tree", "4 nodes", "8 nodes", "chain", "tree without conditioning", "by source"}
    assert lengths["tree"] >= 1.0
    assert set(measured["accuracy by stream"]) == {"best token", "one of the 8 best"}
    assert all(0 <= share <= 1 for share in measured["accuracy by stream"]["one of the 8 best"])
    assert len(measured["share of drafted steps that accept at least 1, 2, ... tokens"]) == 4
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| accuracy by stream: best token |" in card
    assert "length: top" not in card
    # a card goes to other machines
    assert str(tmp_path) not in (folder / "README.md").read_text(encoding="utf-8")
    asked = [request(5, 1, 12)]
    drafter = StreamDrafter(TARGET.decoder, loaded.module)
    assert decode(TARGET.decoder, asked, drafter)[0] == decode(TARGET.decoder, asked)[0]
    before = (folder / "adapter.safetensors").read_bytes()
    refused = call(*arguments)
    assert isinstance(refused.exception, FileError)
    assert str(refused.exception).endswith("contains a finished adapter; give another --out, or --force to replace it")
    again = call(*arguments, "--force")
    assert again.exit_code == 0
    assert (folder / "adapter.safetensors").read_bytes() == before
    assert "parameters" in again.stdout


def test_the_papers_other_forms(written: Path, tmp_path: Path) -> None:
    """Where streams start (eta), rotated values (epsilon of eq. 8), the main row's top positions (appendix H.1)."""
    forms = ("--init-rank", 2, "--position", "rotation", "--rotation-step", 0.05, "--context-top", 3)
    plan = ("--recipe", "paper-lossless", "--stream-layers", 2, *forms, "--keep-states", "exact")
    folder, sizes = tmp_path / "adapter", ("--batch-tokens", 120, "--held-out", 4, "--no-timing")
    result = call("streams", "--answers", written, "--out", folder, *plan, *sizes)
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["config"]
    assert [config[name] for name in ("init_rank", "rotation_step", "context_top")] == [2, 0.05, 3]
    asked = [request(5, 1, 12)]
    drafter = StreamDrafter(TARGET.decoder, load_adapter(folder, TARGET).module)
    assert decode(TARGET.decoder, asked, drafter)[0] == decode(TARGET.decoder, asked)[0]


def test_the_end_of_a_training_with_speeds_and_a_figure(written: Path, tmp_path: Path) -> None:
    folder, figure = tmp_path / "adapter", tmp_path / "curve.svg"
    arguments = ("streams", "--answers", written, "--out", folder, *SMALL[:-1], "--figure", figure, "--warmup", 0)
    result = call(*arguments, "--evaluate-every", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(" nodes  ") == 2
    assert "Measured, one prompt at a time:" in result.stdout
    assert " tokens/s (auto), plain " in result.stdout
    assert "Held-out mean acceptance length (16 nodes) by step:" in result.stdout
    assert "{" not in result.output, "no JSON for people"
    assert figure.read_text(encoding="utf-8").count("</svg>") == 1
    refused = call(*arguments)
    assert isinstance(refused.exception, FileError)
    assert "curve.svg exists already" in str(refused.exception)


def test_too_few_data_are_warned_of(written: Path, tmp_path: Path) -> None:
    with pytest.warns(TrainingWarning) as caught:
        call("streams", "--answers", written, "--out", tmp_path / "d", *SMALL, "--warmup", 50)
    said = [str(one.message) for one in caught]
    assert any("the warmup of 50 steps" in sentence for sentence in said)
    assert any("completion tokens are few for" in sentence for sentence in said)


def test_plain_text_and_nothing_held_out(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(" ".join(f"w{i}" for i in prompt(300)), encoding="utf-8")
    text = ("streams", "--text", tmp_path / "t.txt", "--out", tmp_path / "b")
    result = call(*text, *SMALL, "--held-out", 0, "--max-tokens", 40, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["measured"] == {}


@pytest.mark.thorough
def test_no_data_at_all_is_one_command_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [{"prompt": " ".join(f"w{i}" for i in prompt(4, n))} for n in range(8)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own), encoding="utf-8")
    folder, mine = tmp_path / "adapter", ("--evaluate", tmp_path / "mine.jsonl")
    arguments = ("streams", "--out", folder, "--self-tokens", 400, "--self-rows", 8, *mine, *SMALL, "--warmup", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert call(*arguments).exit_code == 130
    data = folder / "data"
    kept = {name: (data / name).read_bytes() for name in ("prompts.jsonl", "answers.jsonl", "evaluate.jsonl")}
    assert sum(len(json.loads(line)["answer_ids"]) for line in kept["answers.jsonl"].splitlines()) >= 400
    result = call(*arguments, "--evaluate-every", 2, "--json")
    assert result.exit_code == 0, result.output
    assert {name: (data / name).read_bytes() for name in kept} == kept, "nothing was written twice"
    record = json.loads(result.stdout)
    assert record["training"]["data"][0]["source"] == "self-written"
    assert record["training"]["data"][0]["licence"] == "written by the target itself"
    assert record["training"]["options"]["epochs"] == 1.0
    assert record["measured"]["own prompts"]["held-out answers"] > 2
    assert record["run"]["scaling"]["tokens"] == record["training"]["answer_tokens"]
    assert any("twice the data is predicted to change it" in sentence for sentence in record["run"]["next"])
    load_adapter(folder, TARGET)


def test_beginning_with_another_adapter(written: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begun = call("streams", "--answers", written, "--out", first, *SMALL, "--epochs", 1, "--json")
    gentle = ("--epochs", 1, "--lr", 1e-9, "--warmup", 0)
    further = ("streams", "--answers", written, "--out", second, "--init", first, *SMALL)
    result = call(*further, *gentle, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["training"]["init"] == json.loads(begun.stdout)["sha256"]
    # a rate of nothing leaves the weights that it began with
    old, new = load_adapter(first, TARGET).module, load_adapter(second, TARGET).module
    for name, value in old.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], value, atol=1e-5, rtol=1e-2)
    other = call(*further, *gentle, "--adapter-rank", 3, "--force")
    assert isinstance(other.exception, InputError)
    assert "adapter_rank 16, but this training uses 3" in str(other.exception)
    fresh = call("streams", "--answers", written, "--out", second, *SMALL, *gentle, "--force")
    assert isinstance(fresh.exception, FileError)
    assert "other initial weights" in str(fresh.exception)


def test_beginning_with_lower_ranks(written: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begun = call("streams", "--answers", written, "--out", first, *SMALL, "--epochs", 1)
    assert begun.exit_code == 0, begun.output
    ranks = ("--attention-rank", 18, "--adapter-rank", 17, "--mlp-rank", 4)
    still = ("--epochs", 1, "--lr", 1e-9, "--warmup", 0)
    result = call("streams", "--answers", written, "--out", second, "--init", first, *SMALL, *ranks, *still, "--json")
    assert result.exit_code == 0, result.output
    old, new = load_adapter(first, TARGET).module, load_adapter(second, TARGET).module
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-2)
    for before, after in zip(old.layers, new.layers, strict=True):
        assert after.up.up.shape[1] == after.down.up.shape[1] == 4
        assert max(after.up.up.abs().max(), after.down.up.abs().max()) < 1e-5  # what is new adds nothing yet
        for name in ("qkv", "out", "mlp"):
            was, now = getattr(before, name), getattr(after, name)
            close(now.down[: len(was.down)], was.down)
            close(now.up @ now.down, was.up @ was.down)


def test_beginning_with_fewer_streams_and_layers(written: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begun = call("streams", "--answers", written, "--out", first, *SMALL, "--epochs", 1, "--stream-layers", 1)
    assert begun.exit_code == 0, begun.output
    still = ("--epochs", 1, "--lr", 1e-9, "--warmup", 0, "--num-streams", 6)
    result = call("streams", "--answers", written, "--out", second, "--init", first, *SMALL, *still)
    assert result.exit_code == 0, result.output
    old, new = load_adapter(first, TARGET).module, load_adapter(second, TARGET).module
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-2)
    for name, value in old.layers[-1].state_dict().items():
        close(new.layers[-1].state_dict()[name], value)  # what it has is at the top
    assert all(value.abs().max() < 1e-5 for name, value in new.layers[0].named_parameters() if name.endswith("up"))
    assert new.embeddings is not None
    assert old.embeddings is not None
    close(new.embeddings[: len(old.embeddings)], old.embeddings)
    for own in new.embeddings[len(old.embeddings) :]:
        close(own, old.embeddings[-1])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--epochs", 3), "epochs 1.0 (now 3.0)"),
        (("--num-streams", 3), "num_streams 4 (now 3)"),
        (("--draft-vocabulary", 7), "draft_vocabulary 4096 (now 7)"),
        (("--held-out", 5), "held_out 4 (now 5)"),
        (("--max-tokens", 16), "max_tokens 512 (now 16)"),
    ],
)
def test_going_on_with_other_options_names_them(
    option: tuple[str, int], words: str, written: Path, tmp_path: Path
) -> None:
    arguments = ("streams", "--answers", written, "--out", tmp_path / "d", *SMALL)
    assert call(*arguments).exit_code == 0
    refused = call(*arguments, *option, "--force")
    assert isinstance(refused.exception, FileError)
    assert f"was started with {words}; " in str(refused.exception)
    assert "start over with --no-resume" in str(refused.exception)
    assert call(*arguments, *option, "--no-resume", "--force").exit_code == 0


def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("loaded"))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": 0, "prompt": "w1"}\n{"id": 1, "prompt": "w2"}', encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    kept = prompts.read_bytes()
    for out, message in (
        (prompts, "contains the prompts"),
        (tmp_path, "is a folder"),
        (prompts / "a.jsonl", "choose another --out"),
    ):
        result = call("answers", "--prompts", prompts, "--out", out)
        assert isinstance(result.exception, FileError)
        assert message in str(result.exception)
    other = call("answers", "--prompts", written, "--out", prompts)
    assert "line 1 of" in str(other.exception)
    assert prompts.read_bytes() == kept
    assert sorted(tmp_path.iterdir()) == before


def test_workers_that_cannot_be_are_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "anabranch.integrations.ray_data", raising=False)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "w1"}', encoding="utf-8")
    given = ("--prompts", prompts)
    for words, message in (
        ((*given, "--ray", 0), "--ray must be at least 1, got 0"),
        ((*given, "--ray", 2), r"--ray needs Ray Data, which does not import \(.*pip install 'anabranch\[ray\]'"),
        (("--self-prompted", 4, "--ray", 2), "--ray is for prompts that are there"),
    ):
        result = call("answers", *words, "--out", tmp_path / "a.jsonl")
        assert re.search(message, str(result.exception)), result.output
    assert not (tmp_path / "a.jsonl").exists()


def test_a_training_that_cannot_be_is_refused_before_a_model_is_loaded(
    written: Path, tmp_path: Path, toys: ToyFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("loaded"))
    fine = ("streams", "--answers", written, "--out", tmp_path / "new")
    for arguments, message in (
        (("streams", "--answers", tmp_path / "none", "--out", tmp_path / "new"), "there is no file"),
        (("streams", "--text", tmp_path / "none", "--out", tmp_path / "new"), "there is no file"),
        ((*fine, "--text", written), "give either a file of completions"),
        (("streams", "--text", tmp_path / "p.jsonl", "--out", tmp_path / "new"), "with a field 'text'; its fields are"),
        (("streams", "--answers", tmp_path / "p.jsonl", "--out", tmp_path / "new"), "with lists of ids prompt_ids and"),
        ((*fine, "--self-tokens", 5), "--self-tokens is for data that the model writes itself"),
        ((*fine, "--evaluate", tmp_path / "none"), "there is no file"),
        (("streams", "--out", tmp_path / "new", "--self-tokens", 0), "tokens must be at least 1, got 0"),
        ((*fine, "--init", tmp_path), "contains no adapter (no adapter_config.json)"),
        ((*fine, "--figure", tmp_path / "f.jpg"), "must be a .png or .svg file"),
        ((*fine, "--figure", written.with_suffix(".png") / "f.png"), "--figure"),
        ((*fine, "--licence", "CC0"), "--licence must be SOURCE=LICENCE, got 'CC0'"),
        ((*fine, "--threads", 0), "threads"),
        (("streams", "--answers", written, "--out", toys.adapter), "contains a finished adapter"),
        (("answers", "--prompts", tmp_path / "none", "--out", tmp_path / "new.jsonl"), "there is no file"),
    ):
        written.with_suffix(".png").touch()
        result = call(*arguments)
        assert isinstance(result.exception, AnabranchError), arguments
        assert message in str(result.exception)
        assert not (tmp_path / "new").exists()


def test_an_adapter_folder_that_cannot_be_made(written: Path, tmp_path: Path) -> None:
    result = call("streams", "--answers", written, "--out", tmp_path / "p.jsonl", *SMALL)
    assert isinstance(result.exception, FileError)
    assert "p.jsonl is a file; give --out a folder" in str(result.exception)


def test_help_says_where_kept_states_lie() -> None:
    said = " ".join(call("streams", "--help").stdout.split())
    assert "on a CPU in a file in the run's folder: none, exact, or int8" in said


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_shows_defaults_and_what_recipes_hold(columns: int) -> None:
    said = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["streams", "--help"], terminal_width=columns).stdout
    assert max(map(len, said.splitlines())) <= columns
    assert "[default: 0.0015]" in said
    names, *rows = recipe_rows(TRAINING.options, TRAINING.recipes)
    assert names == ["", *TRAINING.recipes]
    assert ["--init", "none", "none", "none", "shipped", "none"] in rows
    assert ["--main-attends", "none", "none", "none", "none", "own"] in rows
    assert not any(row[0] == "--seed" for row in rows), "it is the same in all"
    table = said[said.index("Where recipes differ") :]
    for row in rows:
        shown = [line.split() for line in table.splitlines() if line.split()[:1] == row[:1]]
        assert [cell for line in shown for cell in line[1:]] == row[1:]


def test_ctrl_c_says_how_to_go_on(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("streams", "--answers", written, "--out", tmp_path / "c", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        stopped = call(*arguments)
    assert stopped.exit_code == 130
    assert "stopped; the same command resumes from here: anabranch" in stopped.stderr
    assert not (tmp_path / "c" / "adapter_config.json").exists()


def test_a_stopped_run_says_its_step_and_a_resumed_one_where_it_goes_on(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("streams", "--answers", written, "--out", tmp_path / "d", *SMALL, "--epochs", 4)
    monkeypatch.setattr("sys.argv", ["anabranch", "train", *map(str, arguments), "--no-resume"])
    step = Trainer.step

    def stopping(self: Trainer, *given: Any) -> Any:
        if self.done == 2:
            raise KeyboardInterrupt
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stopping)
        stopped = call(*arguments, "--no-resume")
    again = shlex.join(["anabranch", "train", *map(str, arguments)])
    assert f"stopped after step 2; the same command resumes from here: {again}\n" in stopped.stderr
    assert "resumes from step 2, the checkpoint in " in call(*arguments).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("streams", "--out", "x", "--self-temperature", -1), "temperature"),
        (("answers", "--out", "x"), "either a file of prompts"),
        (("answers", "--out", "x", "--prompts", "p", "--self-prompted", 3), "either a file of prompts"),
        (("answers", "--out", "x", "--self-prompted", 0), "--self-prompted must be at least 1, got 0"),
        (("answers", "--out", "x", "--self-prompted", 3, "--limit", 2), "--limit is for --prompts"),
        (("streams", "--out", "x", "--answers", "nowhere"), "no file nowhere"),
        (("streams", "--out", "x", "--answers", "a", "--recipe", "grand"), "default-adapter, small, paper-lossless"),
        (("streams", "--out", "x", "--answers", "a", "--num-streams", 0), "num_streams"),
        (("streams", "--out", "x", "--answers", "a", "--soft", 2), "soft"),
        (("streams", "--out", "x", "--answers", "a", "--schedule", "flat"), "schedule"),
        (("streams", "--out", "x", "--answers", "a", "--held-out", -1), "held_out"),
        (("answers", "--prompts", "nowhere", "--out", "x"), "no file nowhere"),
        (("answers", "--prompts", "nowhere", "--out", "x", "--temperature", -1), "temperature"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    arguments: tuple[Any, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, AnabranchError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not any(tmp_path.iterdir())


def test_licences_have_two_sides(written: Path, tmp_path: Path) -> None:
    result = call("streams", "--answers", written, "--out", tmp_path / "d", *SMALL, "--licence", "CC0")
    assert isinstance(result.exception, InputError)


def test_answers_of_another_target(written: Path, tmp_path: Path) -> None:
    settings = settings_path(written)
    settings.write_text(settings.read_text(encoding="utf-8").replace(TARGET.fingerprint, "f" * 64), encoding="utf-8")
    result = call("streams", "--answers", written, "--out", tmp_path / "e")
    assert isinstance(result.exception, FileError)
    assert "another target" in str(result.exception)
    assert not (tmp_path / "e").exists()


def test_a_target_that_does_not_load_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileError("there is no model")

    monkeypatch.setattr(load, "load_target", missing)
    assert isinstance(call("streams", "--out", tmp_path / "deep" / "new", *SMALL).exception, FileError)
    assert not any(tmp_path.iterdir())


def test_an_adapter_that_ships_is_a_start_by_name_and_gives_its_shape(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped" / "toy-streams"
    begun = call("streams", "--answers", written, "--out", shipped, *SMALL, "--json")
    assert begun.exit_code == 0, begun.output
    monkeypatch.setattr(folder, "SHIPPED", shipped.parent)
    sha, shape = (json.loads(begun.stdout)[name] for name in ("sha256", "config"))
    still = ("--answers", written, "--batch-tokens", 120, "--no-timing", "--epochs", 1, "--lr", 1e-9, "--json")
    for init in ("toy-streams", "default", shipped):
        result = call("streams", "--out", tmp_path / "out", "--init", init, *still, "--force")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert (record["training"]["init"], record["config"]) == (sha, shape)
        assert "starts from the adapter toy-streams" in result.stderr
    more = call("streams", "--out", tmp_path / "more", "--init", "default", *still, "--attention-rank", 20)
    assert json.loads(more.stdout)["config"] == {**shape, "attention_rank": 20}
    fresh = call("streams", "--out", tmp_path / "fresh", "--recipe", "small", "--init", "none", *still, *SHAPE)
    assert "init" not in json.loads(fresh.stdout)["training"]
    plan = TRAINED.training.recipe("shared", {"lora_rank": 2})
    start = start_folder(None, plan, METHOD, TARGET)
    assert start == shipped
    assert adopted(plan, METHOD, start).config == replace(StreamConfig(**shape), mode="shared", lora_rank=2)
    own = adopted(TRAINED.training.recipe("shared", {"main_attends": "own"}), METHOD, start).config
    assert (own.main_attends, own.root_width) == ("own", 0)
    monkeypatch.setattr(folder, "SHIPPED", tmp_path / "none")
    assert start_folder(None, plan, METHOD, TARGET) is None
    refused = call("streams", "--out", tmp_path / "x", "--init", "default", *still)
    assert "no adapter for the method 'streams' ships for default" in str(refused.exception)


def test_small_data_are_mostly_trained_on() -> None:
    plan = TRAINED.training.recipe()
    assert [plan.held_out_of(n) for n in (1, 2, 9, 100, 10_000)] == [0, 1, 1, 10, 64]
    assert replace(plan, held_out=7).held_out_of(10) == 7
    assert [plan.options.warmup_of(steps) for steps in (1, 21, 400, 10_000)] == [0, 2, 40, 50]
    assert replace(plan.options, warmup=9).warmup_of(10) == 9


@pytest.mark.parametrize("name", TRAINING.recipes)
def test_recipes_name_what_they_are(name: str) -> None:
    plan = TRAINED.training.recipe(name)
    assert plan.config.num_streams == (5 if name in ("default-adapter", "shared") else 4)
    if name == "shared":
        assert plan.config.main_attends == "none"
        assert plan.config.root_width
        assert plan.init == "shipped"
        assert TRAINED.training.recipe(name, {"main_attends": "own"}).config.root_width == 0
    if name == "paper-lossless":
        assert plan.config.stream_mlp == "adapter"
        assert plan.config.conditioning == "none"
        assert (plan.loss.decay, plan.loss.soft) == (1.0, 0.0)
