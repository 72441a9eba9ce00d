"""Methods from files and from installed packages."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.errors import FileError, InputError
from anabranch.methods import parse_spec
from anabranch.methods import registry as methods
from toy_text import ToyFolders, toy_model
from verbs import Anabranch

PLUGIN = """
from dataclasses import dataclass

import anabranch
from anabranch.methods import Drafter, Method
from anabranch.drafting.settings import Settings
from anabranch.tree import DraftTree


@dataclass(frozen=True)
class EchoSettings(Settings):
    tokens: int = 3


class EchoDrafter(Drafter):
    name = "echo"

    def __init__(self, tokens):
        self.tokens, self.max_nodes = tokens, tokens + 1

    def draft(self, rows, budget):
        return [
            DraftTree.chain(row.root, [row.root] * min(self.tokens, row.max_depth, budget - 1), source="echo")
            for row in rows
        ]


METHOD = Method("echo", "the last token again", EchoSettings, lambda target, s, module: EchoDrafter(s.tokens))
"""
REGISTERS = PLUGIN + "\nanabranch.register(METHOD)\n"


@pytest.fixture(autouse=True)
def _registry_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_registry", methods._registry)


def written(folder: Path, text: str) -> Path:
    path = folder / "my plugin.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_registers_a_drafter(tmp_path: Path) -> None:
    path = written(tmp_path, REGISTERS)
    (method,) = anabranch.load_plugin(path)
    assert method.name == "echo"
    assert [again.name for again in anabranch.load_plugin(str(path))] == ["echo"]
    model = toy_model()
    out = model.generate("the thing", max_new_tokens=12, drafter="echo:tokens=2+suffix")
    assert out.token_ids == model.generate("the thing", max_new_tokens=12, drafter="none").token_ids
    assert out.stats.draft_nodes > 0


def test_a_verb_takes_a_plugin(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    where = ("--model", toys.model, "--dtype", "float32", "--device", "cpu", "-n", 8)
    plain = anabranch("generate", "the thing", *where, "--drafter", "none")
    # also where the drafter is named first
    done = anabranch("generate", "the thing", *where, "--drafter", "echo", "--plugin", written(tmp_path, REGISTERS))
    assert (done.code, done.out) == (0, plain.out)
    assert "drafter echo" in done.err
    done = anabranch("certify", *where, "--drafter", "echo", "--limit", 1)
    assert done.out.startswith("1 equal, 0 ties, 0 bugs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n\nundefined\n", "my plugin.py, line 3: NameError: name 'undefined' is not defined"),
        ("def f(:\n", "my plugin.py, line 1: SyntaxError: "),
        ("import not_there_at_all\n", "line 1: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("import json\n\njson.loads('{')\n", "line 3: JSONDecodeError: "),
        ("x = 1\n", "registers no method; call anabranch.register(Method(...)) in it"),
        (
            PLUGIN + "anabranch.register(Method('suffix', '', EchoSettings, None))\n",
            "is taken by a method of the library",
        ),
        ("raise SystemExit\n", "line 1: SystemExit"),
    ],
)
def test_a_file_that_fails_is_one_sentence(anabranch: Anabranch, tmp_path: Path, text: str, said: str) -> None:
    done = anabranch("generate", "hello", "--plugin", written(tmp_path, text))
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("name", ["nothing.py", "."])
def test_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no file"):
        anabranch.load_plugin(tmp_path / name)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileError, match=r"give one that ends in \.py"):
        anabranch.load_plugin(tmp_path / "notes.txt")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with entry points."""
    (tmp_path / "echoing.py").write_text(PLUGIN)
    info = tmp_path / "echoing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echoing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[anabranch.methods]\necho = echoing:METHOD\nbroken = echoing:NOTHING\nother = echoing:METHOD\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("echoing", None)


def test_the_entry_point_of_a_package_is_imported_when_it_is_named(package: Path) -> None:
    parse_spec("suffix")
    assert "echoing" not in sys.modules
    assert str(parse_spec("suffix+echo:tokens=2")) == "suffix+echo:tokens=2"
    assert "echo" in [method.name for method in methods.methods()]
    with pytest.raises(InputError, match="the method 'broken' of the package echoing cannot be imported"):
        parse_spec("broken")
    with pytest.raises(
        InputError, match="the entry point 'other' of the package echoing must be a Method of that name"
    ):
        parse_spec("other")


def test_help_lists_it_without_importing_it(package: Path) -> None:
    code = "from anabranch.cli import main\ntry: main(['chat', '--help'])\nfinally: print('echoing' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "of the package echoing" in done.stdout
    assert done.stdout.endswith("False\n")
