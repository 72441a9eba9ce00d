"""README and docs: their Python runs, their commands exist, their links lead somewhere, their numbers are the results'.

A Python block runs unless the line before it is ``<!-- not run: REASON -->``; then only its imports do. The blocks of a
page share their names.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from anabranch.cli import app
from anabranch.methods import registry as methods

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RECORDS = ("benchmarks.md", "log.md")  # the commands of older versions stand there as they were
SLOW = ("capabilities.md", "index.md", "integrations.md", "python.md")  # README and methods.md run every time
PAGES = [
    README,
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name not in RECORDS and p.parent.name != "benchmarks"),
]
PYTHON = re.compile(r"(<!-- not run: .+ -->\n+)?```python\n(.*?)```", re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    """The blocks of ``page`` in order; of a block that does not run, its imports."""
    found = PYTHON.findall(page.read_text(encoding="utf-8"))
    return [imports(block) if skipped else block for skipped, block in found]


def imports(block: str) -> str:
    """The import statements at the top level of ``block``."""
    statements = ast.parse(block).body
    return "\n".join(ast.unparse(s) for s in statements if isinstance(s, ast.Import | ast.ImportFrom))


@pytest.mark.default_model
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.thorough if page.parent.name == "methods" or page.name in SLOW else ())
        for page in PAGES
        if python_blocks(page)
    ],
    ids=lambda page: page.name,
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for files that an example writes
    monkeypatch.setattr(methods, "_registry", methods._registry)  # an example registers a method
    module = ModuleType(f"example_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up there
    for number, block in enumerate(python_blocks(page), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), module.__dict__)


def commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a shell line, without comments, redirections and operators.

    >>> list(commands("printf 'a' | anabranch chat > out.txt  # reads a pipe"))
    [['printf', 'a'], ['anabranch', 'chat']]
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    target = False  # the next word is the file of a redirection
    for word in lexer:
        if set(word) <= set("<>"):
            target = True
        elif target:
            target = False
        elif set(word) <= set("|&;"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def written_commands(page: Path) -> Iterator[list[str]]:
    """Every command in the console blocks of ``page``, and every `anabranch ...` between backticks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += [re.sub(r"\s+", " ", found) for found in re.findall(r"`(anabranch [^`]+)`", prose)]
    for line in lines:
        yield from filter(None, commands(line))


def complaint(words: list[str]) -> str | None:
    """Describe what is wrong with a command of ours: an unknown verb or option, or a missing script."""
    program, *rest = words
    if program in ("python", "python3") and rest and rest[0].startswith(("scripts/", "research/")):
        script = ROOT / rest[0]
        if not script.is_file():
            return f"there is no {rest[0]}"
        known = script.read_text(encoding="utf-8") + "".join(p.read_text("utf-8") for p in script.parent.glob("*.py"))
        return next((f"{rest[0]} has no {w}" for w in rest if w.startswith("--") and f'"{w}"' not in known), None)
    if program != "anabranch":
        return None
    command: Any = typer.main.get_command(app)
    left = iter(rest)
    for word in left:
        if word.startswith("-") and word != "-" and (default := getattr(command, "default", None)):
            command = command.get_command(None, default)
        if word.startswith("-") and word != "-":
            name, _, value = word.partition("=")
            option = next((p for p in command.params if name in (*p.opts, *p.secondary_opts)), None)
            if option is None and name not in ("-h", "--help"):
                return f"anabranch {command.name} has no option {name}"
            if option is not None and not option.is_flag and not value:
                next(left, None)  # its value
        elif hasattr(command, "get_command"):
            verb = command.get_command(None, word)
            if verb is None:
                return f"anabranch {command.name} has no verb {word!r}"
            command = verb
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    complaints = [f"{shlex.join(words)}: {why}" for words in written_commands(page) if (why := complaint(words))]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["anabranch", "generat", "x"], "has no verb 'generat'"),
        (["anabranch", "train", "prompt_lookup"], "has no verb 'prompt_lookup'"),
        (["anabranch", "train", "streams", "--no-such-option"], "has no option --no-such-option"),
        (["anabranch", "generate", "x", "--no-such-option"], "has no option --no-such-option"),
        (["python", "scripts/none.py"], "there is no scripts/none.py"),
        (["python", "scripts/fuzz.py", "--no-such-option"], "scripts/fuzz.py has no --no-such-option"),
    ],
)
def test_a_wrong_command_is_found(words: list[str], why: str) -> None:
    assert why in str(complaint(words))


def test_readme_is_short_and_its_links_lead_to_files() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    links = re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_every_picture_is_shown_somewhere() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (README, *(ROOT / "docs").rglob("*.md")))
    pictures = [path.name for path in (ROOT / "docs" / "pictures").iterdir()]
    assert [name for name in pictures if not re.search(rf"pictures/{re.escape(name)}[)#]", pages)] == []


GENERATORS = ("benchmarks_page.py", "controller_page.py", "readme_page.py", "settings_page.py")


def check_numbers(*scripts: Path) -> tuple[int, str]:
    """Status and output of the check of generated files, by all scripts in one process; the first failure ends it."""
    code = "import runpy, sys\nsys.path.insert(0, sys.argv[1])\nscripts = sys.argv[2:]\nsys.argv[1:] = ['--check']\n"
    code += "for path in scripts:\n    try:\n        runpy.run_path(path, run_name='__main__')\n"
    code += "    except SystemExit as end:\n        end.code and sys.exit(end.code)\n"
    command = [sys.executable, "-c", code, str(scripts[0].parent), *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr)  # shown if a test fails
    return done.returncode, done.stdout


@pytest.mark.thorough
def test_numbers_are_those_of_the_result_files() -> None:
    assert check_numbers(*(ROOT / "research" / name for name in GENERATORS)) == (0, "")


@pytest.mark.thorough
def test_a_changed_number_is_found(tmp_path: Path) -> None:
    for name in ("docs", "benchmarks", "research"):
        shutil.copytree(ROOT / name, tmp_path / name)
    text = README.read_text(encoding="utf-8")
    changed = re.sub(r"plain decoding \| \d+ \|", "plain decoding | 999 |", text, count=1)
    assert changed != text
    (tmp_path / "README.md").write_text(changed, encoding="utf-8")
    status, output = check_numbers(tmp_path / "research" / "readme_page.py")
    assert status == 1
    assert output.startswith("README.md differs")


def test_the_tests_that_the_table_of_situations_names_exist() -> None:
    named = re.findall(
        r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs" / "situations.md").read_text(encoding="utf-8")
    )
    assert len(named) > 30
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def code_cells() -> list[dict[str, Any]]:
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_was_run_from_top_to_bottom() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for cell in cells for output in cell["outputs"]} == {
        *("execute_result", "stream", "display_data")
    }


@pytest.mark.thorough
@pytest.mark.default_model
def test_the_notebook_runs(tmp_path: Path) -> None:
    text, fewer = (ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"), tmp_path / "tour.ipynb"
    assert '\\"4000\\"' in text
    fewer.write_text(text.replace('\\"4000\\"', '\\"300\\"'), encoding="utf-8")  # tokens to train on
    command = [sys.executable, ROOT / "research" / "notebook.py", fewer, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
