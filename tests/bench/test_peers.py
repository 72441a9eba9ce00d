"""The wire to a peer, with a real process at its other end that is as good or as bad as the test wants."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.bench.peers import PEERS, Peer, PeerError, launch, open_peer, parse_peer
from anabranch.bench.peers.catalogue import ENVIRONMENTS
from anabranch.errors import CapabilityError, InputError
from anabranch.model.load import Target, load_target
from anabranch.sampling import SamplingParams
from toy_text import ToyFolders, toy_model

SERVERS = Path(launch.__file__).parent
EOS, VOCABULARY = 2, 50

# echoes the prompt round and round; `mode` says when it misbehaves and how
FAKE = """
import os, signal, subprocess, sys, time
from servers.wire import serve

mode = sys.argv[1]

class Echo:
    info = {"weights": "none", "pid": os.getpid()}

    def decode(self, request):
        count, ids = request["max_new_tokens"], request["ids"]
        tokens = [ids[i % len(ids)] for i in range(count)]
        if mode == "crash":
            print("the engine fell over", file=sys.stderr, flush=True)
            os._exit(7)
        if mode == "killed":
            os.kill(os.getpid(), 9)
        if mode == "interrupts":
            os.kill(os.getppid(), signal.SIGINT)
        if mode in ("hang", "interrupts"):
            time.sleep(600)
        if mode == "noise":
            print("hello from python", flush=True)
            os.write(1, b"hello from C\\n")
            subprocess.run(["echo", "hello from a child"])
        if mode == "refuses":
            raise ValueError("prompts like this are not for me")
        if mode == "many":
            tokens.append(1)
        if mode == "few":
            tokens.pop()
        if mode == "ends":
            tokens = [5, 2]
        if mode == "goes on":
            tokens[0] = 2
        if mode == "outside":
            tokens[-1] = 50
        if mode == "words":
            tokens[-1] = "river"
        return tokens, {"no time": 0, "late": 0.001}.get(mode, 0.25), 0.125

def load(request):
    if mode == "load":
        sys.exit("no such weights")
    if mode == "worker":
        child = subprocess.Popen(["sleep", "600"])
        Echo.info["worker"] = child.pid
    return Echo()

serve(load)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Any]:
    """Starts a fake peer in a mode; all of them are closed afterwards."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    opened: list[Peer] = []

    def start(mode: str, *, timeout: float = 300.0) -> Peer:
        peer = _peer([sys.executable, str(script), mode], timeout=timeout)
        opened.append(peer)
        return peer

    yield start
    for peer in opened:
        peer.close()


def _peer(command: list[str], *, timeout: float = 300.0) -> Peer:
    return Peer(
        "fake",
        command,
        {"threads": 1},
        sampling=SamplingParams(),
        eos=(EOS,),
        vocabulary=VOCABULARY,
        environment={**os.environ, "PYTHONPATH": str(SERVERS)},
        timeout=timeout,
    )


def _gone(pid: int) -> bool:
    """Return whether a process is gone, or waits to be reaped by whoever inherited it."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("mode", ["works", "noise"])
def test_a_peer_decodes_ids_and_keeps_its_own_clock(fake: Any, mode: str) -> None:
    peer = fake(mode)
    for count in (1, 5):
        run = peer.decode([3, 4], max_new_tokens=count)
        assert run.token_ids == [3, 4, 3, 4, 3][:count]
        assert (run.seconds, run.arrivals[0]) == (0.25, (0.125, 1))
    assert peer.info["weights"] == "none"
    assert peer.info["load_seconds"] >= 0
    assert peer.info["threads"] == 1


def test_an_answer_may_end_early_only_at_the_end_token(fake: Any) -> None:
    assert fake("ends").decode([3], max_new_tokens=9).token_ids == [5, EOS]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("crash", "ended with exit code 7; its last output: the engine fell over"),
        ("killed", "was ended by SIGKILL"),
        ("refuses", "could not decode: ValueError: prompts like this are not for me"),
        ("many", "sent an invalid answer: 5 tokens, but at most 4"),
        ("few", "stopped after 3 of 4 tokens without an end token"),
        ("goes on", "continued after the end token"),
        ("outside", "not a list of token ids below 50"),
        ("words", "not a list of token ids below 50"),
        ("no time", "its times are 0 s"),
        ("late", "0.125 s to the first token"),
    ],
)
def test_what_goes_wrong_in_decoding_is_an_error_from_then_on(fake: Any, mode: str, message: str) -> None:
    peer = fake(mode)
    for _ in range(2):
        with pytest.raises(PeerError, match=message):
            peer.decode([3, 4], max_new_tokens=4)
    assert _gone(peer.info["pid"])


def test_a_peer_that_hangs_is_stopped(fake: Any) -> None:
    peer = fake("hang")
    peer.timeout = 0.2
    with pytest.raises(PeerError, match=r"no answer to 'decode' within 0\.2 s and was stopped"):
        peer.decode([3], max_new_tokens=4)
    assert _gone(peer.info["pid"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["-c", "raise SystemExit('no such weights')"], "ended with exit code 1; its last output: no such weights"),
        (["-c", "print('Welcome to the engine!')"], "sent an invalid answer: 'Welcome to the engine!'"),
        (["-c", "print('[1, 2]')"], "sent an invalid answer"),
        (["-c", "print('{\"ok\": true}')"], "did not report what it loaded"),
        (["-c", 'print(\'{"ok": false, "error": "ImportError: no engine"}\')'], "could not load: ImportError"),
        (["-c", ""], "without any output"),
    ],
)
def test_what_goes_wrong_in_loading(command: list[str], message: str) -> None:
    with pytest.raises(PeerError, match=message):
        _peer([sys.executable, *command])


def test_a_peer_that_cannot_load_says_why(fake: Any) -> None:
    with pytest.raises(PeerError, match="exit code 1; its last output: no such weights"):
        fake("load")


def test_an_interpreter_that_is_not_there() -> None:
    with pytest.raises(PeerError, match="could not be started"):
        _peer(["/nowhere/python"])


def test_close_ends_workers_too_and_may_be_called_twice(fake: Any) -> None:
    peer = fake("worker")
    peer.close()
    peer.close()
    assert _gone(peer.info["pid"])
    assert _gone(peer.info["worker"])
    with pytest.raises(PeerError, match="was closed"):
        peer.decode([3], max_new_tokens=1)


def test_ctrl_c_while_a_peer_decodes_leaves_no_late_answer(fake: Any) -> None:
    peer = fake("interrupts")  # as a user would, once it has the request
    with pytest.raises(KeyboardInterrupt):
        peer.decode([3], max_new_tokens=1)
    assert _gone(peer.info["pid"])
    with pytest.raises(PeerError, match="was interrupted"):
        peer.decode([3], max_new_tokens=1)


# -- names, and what a peer needs --------------------------------------------------------------------------
def test_names_carry_options() -> None:
    assert parse_peer("openvino")[1]["format"] == "fp16"
    builds = [parse_peer(f"llama.cpp-ngram:build={build}")[0].environment for build in ("avx2", "avx512")]
    assert builds == ["llama.cpp", "llama.cpp-avx512"]
    assert set(builds) <= set(ENVIRONMENTS)
    spec, settings = parse_peer("openvino-lookup:format=int4,tokens=7")
    assert (spec.environment, settings["format"], settings["tokens"], settings["ngram"]) == ("openvino", "int4", 7, 3)
    for spec in PEERS.values():
        assert parse_peer(spec.name) == (spec, dict(spec.fixed))
        assert bool(spec.requirements) == (spec.environment is not None)
        assert (SERVERS / "servers" / f"{spec.server}.py").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exllama", "there is no peer 'exllama'; peers are transformers"),
        ("transformers:tokens=3", "has no option 'tokens=3'; options are none"),
        ("transformers-lookup:tokens", "has no option 'tokens'"),
        ("transformers-lookup:tokens=0", "must be a whole number from 1, got '0'"),
        ("transformers-lookup:tokens=3,tokens=4", "twice"),
        ("openvino:format=int3", "must be fp16, int8 or int4"),
        ("vllm:compile=maybe", "must be yes or no"),
        ("llama.cpp-ngram:kind=best", "map_k4v or cache"),
        ("llama.cpp:build=avx", "must be avx2 or avx512, got 'avx'"),
    ],
)
def test_names_that_mean_nothing(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_peer(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("transformers-assisted", "assistant=FOLDER"),
        ("llama.cpp-draft", r"llama\.cpp-draft:draft=FILE"),
        ("llama.cpp-draft:draft=nowhere.gguf", "got nowhere"),
        ("transformers-assisted:assistant=nowhere", "not a model folder"),
        ("economize", "peers install economize"),
        ("llama.cpp", "peers install llama.cpp"),
        ("llama.cpp:build=avx512", "peers install llama.cpp-avx512"),
        ("openvino", "peers install openvino"),
        ("vllm-ngram", "peers install vllm"),
    ],
)
def test_what_a_peer_lacks(
    toys: ToyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    with pytest.raises(CapabilityError, match=message):
        _open(name, load_target(str(toys.model)))


def test_what_a_peer_cannot_serve(toys: ToyFolders) -> None:
    target = load_target(str(toys.model))
    with pytest.raises(CapabilityError, match="min_p"):
        _open("transformers", target, SamplingParams(temperature=1.0, min_p=0.1))
    with pytest.raises(CapabilityError, match="needs a model folder"):
        _open("transformers", toy_model().target)


def _open(name: str, target: Target, sampling: SamplingParams | None = None) -> Peer:
    return open_peer(name, target, sampling=sampling or SamplingParams(), threads=1, capacity=64)


# -- the real thing ----------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["transformers", "transformers-lookup:tokens=4", "transformers-assisted"])
def test_transformers_decodes_what_we_decode(toys: ToyFolders, name: str) -> None:
    from anabranch.bench.run import Ours
    from anabranch.methods import make_drafter

    target = load_target(str(toys.model), dtype="float32")
    prompt = target.tokenizer.encode("the river, the river, the")
    ours = Ours(target, make_drafter("none", target.decoder), capacity=64, call={})
    (expected,) = ours.serve([prompt], rows=1, max_new_tokens=16).answers
    peer = _open(f"{name}:assistant={toys.model}" if name.endswith("assisted") else name, target)
    try:
        (run,) = peer.serve([prompt], rows=1, max_new_tokens=16).answers
        assert run.token_ids == expected.token_ids
        assert 0 < run.arrivals[0][0] <= run.seconds
        assert peer.info["weights"] == "float32"
        assert set(peer.info["versions"]) == {"python", "transformers", "torch"}
        if sys.platform == "linux":
            assert peer.info["peak_memory_bytes"] > 1e7
    finally:
        peer.close()


@pytest.mark.thorough
def test_transformers_samples_by_the_seed(toys: ToyFolders) -> None:
    target = load_target(str(toys.model), dtype="float32")
    peer = _open("transformers", target, SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3))
    try:
        runs = [peer.decode([70, 71, 72], max_new_tokens=12).token_ids for _ in range(2)]
    finally:
        peer.close()
    assert runs[0] == runs[1]
