"""``anabranch chat``: the conversation and its commands, through a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from terminals import PROGRAM, Terminal

from anabranch.api import Model
from anabranch.cli.chat import ChatConfig, Conversation
from anabranch.cli.show import cleaned
from anabranch.decoding.engine import Engine
from anabranch.errors import AnabranchError
from toy_text import ToyFolders
from verbs import Anabranch

SLOWLY = """
import itertools, time
from anabranch.decoding.engine import Engine
step, number = Engine.step, itertools.count()
Engine.step = lambda engine: time.sleep(min(0.5, 0.05 * next(number))) or step(engine)
from anabranch.cli import main
main()
"""


def conversation(model: Model, *, temperature: float = 0.0, seed: int = 0) -> Conversation:
    call = {**ChatConfig().call, "max_new_tokens": 6, "temperature": temperature, "seed": seed}
    return Conversation(model, ChatConfig(call=call))  # type: ignore[arg-type]


@pytest.fixture
def talk(model: Model) -> Conversation:
    return conversation(model)


def said(talk: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in talk.messages]


def test_a_pipe_is_answered_line_by_line(anabranch: Anabranch, where: list[object], model: Model) -> None:
    done = anabranch("chat", *where, "-n", 6, "--system", "the", stdin="thing\n\nother")
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "thing"}]
    first = model.chat(messages, max_new_tokens=6).text
    second = model.chat(
        [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "other"}], max_new_tokens=6
    ).text
    assert done.code == 0
    assert done.out == f"{first}\n{second}\n", "no prompt signs, and an empty line does nothing"
    assert "2 answers in total; 12 tokens, " in done.err
    ended = anabranch("chat", *where, stdin="")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_the_summary_of_every_answer_on_demand(anabranch: Anabranch, where: list[object]) -> None:
    quiet = anabranch("chat", *where, "-n", 6, stdin="thing\nother\n/quit\nnot read\n").err.splitlines()
    assert quiet[:2] == ["stopped at 6 tokens; start chat with --max-new-tokens for more"] * 2
    assert len(quiet) == 3
    told = anabranch("chat", *where, "-n", 6, "--stats", stdin="thing\n").err.splitlines()
    assert [line.startswith("6 tokens, ") for line in told] == [True, True]
    assert all("tokens/s; mean acceptance length" in line and "; stopped at 6 tokens" in line for line in told)


def test_a_message_that_does_not_fit_loses_nothing(anabranch: Anabranch, where: list[object], tmp_path: Path) -> None:
    out = tmp_path / "talk.json"
    lines = ["the", "long " * 40, f"/save {out}", "/reset", "so", "/quit"]
    done = anabranch("chat", *where, "-n", 4, stdin="\n".join(lines))
    assert done.code == 0
    assert "tokens, and the model's limit is 96; /save FILE saves it, /reset starts" in done.err
    assert [message["role"] for message in json.loads(out.read_text())] == ["user", "assistant"]
    assert len(done.out.splitlines()) >= 2


def test_invalid_utf_8_in_a_pipe_ends_the_chat(anabranch: Anabranch, where: list[object]) -> None:
    done = anabranch("chat", *where, "-n", 4, stdin=b"the\n\xe9\nmore\n")
    assert done.code == 1
    assert "error: standard input is not valid UTF-8: byte 0xe9 at offset 4" in done.err


def test_a_model_that_cannot_chat_is_refused_at_once(
    anabranch: Anabranch, toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toy_text.TEMPLATE", None)
    from toy_text import save_toys

    plain = save_toys(tmp_path)
    done = anabranch("chat", "--model", plain.model, stdin="the\n")
    assert (done.code, done.out) == (1, "")
    assert "has no chat template" in done.err


def test_system_prompts_can_be_set_and_removed(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk.take("/system be brief\nand kind")
    assert talk.system == "be brief\nand kind"
    assert "be" in talk.model.tokenizer.decode(talk.prompt_ids([{"role": "user", "content": "the"}]))
    talk.take("/system")
    assert capsys.readouterr().err.count("system prompt: be brief\nand kind") == 2
    talk.take("/system -")
    assert talk.system is None
    assert "no system prompt" in capsys.readouterr().err


def test_retry_replaces_the_last_answer(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(model, temperature=2.0, seed=1)
    with pytest.raises(AnabranchError, match="there is no message to answer again"):
        talk.take("/retry")
    talk.take("the")
    talk.take("so")
    before = said(talk)
    talk.take("/retry")
    assert said(talk)[:3] == before[:3]
    expected = model.chat([dict(m) for m in talk.messages[:3]], max_new_tokens=6, temperature=2.0, seed=2).text
    assert said(talk)[3:] == [("assistant", expected)]
    assert expected != before[3][1]
    assert "the same at temperature 0" not in capsys.readouterr().err
    greedy = conversation(model, seed=1)
    greedy.take("the")
    greedy.take("/retry")
    assert "the answer is the same at temperature 0" in capsys.readouterr().err
    assert len(greedy.messages) == 2


def test_drafters_can_be_changed(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk.take("the")
    talk.take("/drafter none")
    talk.take("/retry")
    assert talk.answered[-1].mean_acceptance_length == 1
    with pytest.raises(AnabranchError, match="there is no drafter 'telepathy'"):
        talk.take("/drafter telepathy")
    with pytest.raises(AnabranchError, match="only 3 streams"):
        talk.take("/drafter streams:depth=9")
    talk.take("/drafter")
    assert capsys.readouterr().err.count("drafter none") == 2
    talk.take("/drafter auto")
    assert talk.drafter == talk.model.drafter


def test_saving_does_not_overwrite(talk: Conversation, tmp_path: Path) -> None:
    out = tmp_path / "a talk.json"
    talk.take("/system the")
    talk.take("grün")
    talk.take(f"/save {out}")
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert saved[:2] == [{"role": "system", "content": "the"}, {"role": "user", "content": "grün"}]
    assert talk.model.chat(saved, max_new_tokens=1).text is not None
    with pytest.raises(AnabranchError, match=r"a talk\.json exists already; .* or '/save! .*a talk\.json'"):
        talk.take(f"/save {out}")
    talk.take("/reset")
    talk.take(f"/save! {out}")
    assert len(json.loads(out.read_text())) == 1
    with pytest.raises(AnabranchError, match="takes a file name"):
        talk.take("/save")
    with pytest.raises(AnabranchError, match="cannot be written"):
        talk.take(f"/save {out / 'below'}")


def test_unknown_commands_give_a_hint(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.take("/rest")
    assert "no command /rest; did you mean /reset? /help lists them" in capsys.readouterr().err
    assert talk.take("/help!")
    assert talk.take("/")
    assert capsys.readouterr().err.count("there is no command /") == 2
    talk.take("/help")
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in ("/save FILE", "/retry", "Alt+Enter"))
    assert max(map(len, lines)) < 60
    assert talk.messages == []
    talk.take("/etc/hosts is a file")
    talk.take(" /reset")
    assert [content for role, content in said(talk) if role == "user"] == ["/etc/hosts is a file", " /reset"]


def test_stats_on_demand(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AnabranchError, match="no complete answer"):
        talk.take("/stats")
    talk.take("the")
    talk.take("so")
    capsys.readouterr()
    talk.take("/stats")
    last, together = capsys.readouterr().err.splitlines()
    assert last.startswith("6 tokens, ")
    assert together.startswith("2 answers in total; 12 tokens, ")


def test_an_error_while_answering_does_not_end_the_chat(
    anabranch: Anabranch, where: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, steps = Engine.step, []

    def failing(self: Engine) -> Any:
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(self)

    monkeypatch.setattr(Engine, "step", failing)
    done = anabranch("chat", *where, "-n", 6, "--drafter", "none", stdin="the\n/retry\n")
    assert done.code == 0
    assert "error: cpu has no memory left for this" in done.err
    assert "stopped at 6 tokens" in done.err


def test_ctrl_c_keeps_what_was_said(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = talk.model.chat([{"role": "user", "content": "the"}], max_new_tokens=6, drafter="none").text
    talk.take("/drafter none")
    honest, steps = Engine.step, []

    def pressed(self: Engine) -> Any:
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return honest(self)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", pressed)
        talk.take("the")
    user, answer = talk.messages
    assert user == {"role": "user", "content": "the"}
    assert answer["interrupted"] is True
    assert whole.startswith(answer["content"])
    assert 0 < len(answer["content"]) < len(whole)
    assert len(steps) == 3, "the step that was going on is complete"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    talk.take("so")
    assert len(talk.messages) == 4
    assert not talk.model._scheduler.busy


def test_ctrl_c_while_a_prompt_is_read_leaves_the_message_out(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anabranch.decoding.ticks.CHUNK", 2)
    honest = Engine.read

    def pressed(self: Engine, key: int, tokens: int) -> int:
        signal.raise_signal(signal.SIGINT)
        return honest(self, key, tokens)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "read", pressed)
        talk.take("words that no other test reads")  # a known beginning would not be read again
    assert talk.messages == []
    assert "stopped before the answer began; /retry sends the message again" in capsys.readouterr().err
    talk.take("/retry")
    assert len(talk.messages) == 2


@pytest.mark.thorough
def test_a_real_terminal(where: list[object], model: Model, tmp_path: Path) -> None:
    question, first = _long_answer(model)
    command = ["chat", *where, "-n", "60", "--drafter", "none"]
    home = {"ANABRANCH_HOME": str(tmp_path)}
    with Terminal(command, columns=60, env=home, code=SLOWLY) as terminal:
        start = terminal.expect("\n>")
        assert start.startswith("loading ")
        assert "/help lists the commands, Ctrl-D leaves" in start
        # three left arrows, a backspace, and the right letter
        terminal.send(question[:-3] + "#" + question[-3:] + "\x1b[D" * 3 + "\x7f\r")
        terminal.expect(f"{question}\n{first}")
        terminal.send("\x03")
        terminal.expect("the answer so far is kept\n>")
        terminal.send("\x1b[200~two\nlines\x1b[201~\\\rand\x1b\rmore\x03")  # a paste, two new lines; cleared
        terminal.send("/hlep\r")
        terminal.expect("did you mean /help?")
        terminal.expect("\n>")
        terminal.send(f"/save {tmp_path / 'talk.json'}\r")
        terminal.expect("saved 2 messages to")
        terminal.expect("\n>")
        terminal.send("/reset\r")
        terminal.expect("new conversation\n>")
        terminal.send("\x1b[A" * 4 + "\r")  # up to the first message
        terminal.expect(f"{question}\n{first}")
        terminal.send("\x03")
        terminal.expect("the answer so far is kept\n>")
        terminal.send("\x04")
        shown = terminal.ended()
    assert terminal.code == 0
    assert "Traceback" not in shown
    user, answer = json.loads((tmp_path / "talk.json").read_text())
    assert user == {"role": "user", "content": question}
    assert answer["interrupted"] is True
    history = tmp_path / "chat_history"
    assert f"+{question}\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def _long_answer(model: Model) -> tuple[str, str]:
    """A question that the toy answers at length, and the first letter of the answer.

    The first word is short: words are shown whole, and a token takes up to half a second.
    """
    for question in ("one two three", "song", "so they say", "another"):
        answer = model.chat([{"role": "user", "content": question}], max_new_tokens=60, drafter="none")
        if len(answer.token_ids) > 40 and len(answer.text.split(maxsplit=1)[0]) < 10:
            return question, cleaned(answer.text[0])
    raise AssertionError("the toy has short answers only")


@pytest.mark.thorough
def test_ctrl_c_at_the_prompt_of_a_real_pipe(toys: ToyFolders) -> None:
    command = [*PROGRAM, "chat", "--model", str(toys.model), "--drafter", "none", "-n", "4", "--stats"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        chat.stdin.write("the\n")
        chat.stdin.flush()
        while "tokens/s" not in (line := chat.stderr.readline()):  # a warning about the toy comes first
            assert line, "it ended without an answer"
        chat.send_signal(signal.SIGINT)
        _, err = chat.communicate(timeout=300)
    assert chat.returncode == 130
    assert "stopped" in err
    assert "Traceback" not in err


@pytest.mark.thorough
@pytest.mark.parametrize("answering", [False, True], ids=["at the prompt", "in an answer"])
def test_sigterm_ends_a_real_terminal(toys: ToyFolders, answering: bool) -> None:
    command = ["chat", "--model", toys.model, "--drafter", "none", "--temperature", "3", "-n", "2000"]
    with Terminal(command) as terminal:
        terminal.expect("/help lists the commands")
        if answering:
            terminal.send("the\r")
            terminal.expect("the")
        os.kill(terminal.pid, signal.SIGTERM)
        terminal.ended()
    assert terminal.code == 143
