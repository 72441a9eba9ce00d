"""Write docs/settings.md, the settings of all drafters and the options of all trainings, from their dataclasses.

python research/settings_page.py            # write
python research/settings_page.py --check    # write nothing; exit 1 if the page would change
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields

from anabranch.drafting.drafter import Method
from anabranch.drafting.settings import Settings
from anabranch.learning.recipe import COMMON
from anabranch.methods import methods
from benchmark_tables import table
from generated import write_or_check

PAGE = "docs/settings.md"
PAGES = {"draft_model", "eagle", "hydra", "lookahead", "medusa", "ngram", "prompt_lookup", "quantized_draft"}
PAGES |= {"rest", "space", "staged", "streams", "suffix"}
INTRODUCTION = """# Settings

Made from the code by `python research/settings_page.py`; `--help` of `generate` and of `train` prints the same.

## Drafters

Settings follow the name of a drafter: `streams:tree=32,prune=16`.
""".splitlines()
TRAINING = """## Training

Options that a recipe sets and the command line overrides; `--help` compares the recipes of a method.
""".splitlines()


def meanings(settings: type[Settings]) -> dict[str, str]:
    """The fields of a settings class, as its docstring and those of its bases describe them, its own first."""
    found: dict[str, str] = {}
    for cls in settings.__mro__:
        name = ""
        for line in (inspect.getdoc(cls) or "").splitlines()[1:]:
            if begins := re.match(r"(\w+) {2,}(\S.*)", line):
                name = begins[1] if begins[1] not in found else ""
                found.setdefault(begins[1], begins[2])
            elif name and line.startswith("   "):
                found[name] += f" {line.strip()}"
            else:
                name = ""
    return found


def drafters() -> Iterator[tuple[str, str, str, str]]:
    """(drafter, setting, default, meaning) of every setting, except those that one drafter has from another."""
    seen: dict[type[Settings], str] = {}
    for method in methods():
        told, inherited = meanings(method.settings), set[str]()
        for cls, name in seen.items():
            if issubclass(method.settings, cls) and method.name != name:
                inherited = {field.name for field in fields(cls)}
                yield _linked(method), f"those of `{name}`", "", ""
        seen.setdefault(method.settings, method.name)
        first = "" if inherited else _linked(method)
        for field in fields(method.settings):
            if field.name not in told:
                raise SystemExit(f"the docstring of {method.settings.__name__} does not say what {field.name} is")
            if field.name not in inherited:
                yield first, f"`{field.name}`", _default(field.default), told[field.name]
                first = ""


def _default(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _linked(method: Method) -> str:
    page = "medusa" if method.name == "medusa2" else method.name
    return f"[`{method.name}`](methods/{page}.md)" if page in PAGES else f"`{method.name}`"


def training() -> Iterator[tuple[str, str, str]]:
    """(option, meaning, methods that have it), those of every training first."""
    of: dict[tuple[str, str], list[str]] = {(name, option.help): [] for name, option in COMMON.items()}
    for method in methods():
        if method.trained is not None and method.name != "medusa2":
            for name, option in method.trained.training.options.items():
                of.setdefault((name, option.help), []).append(f"`{method.name}`")
    most = max(map(len, of.values()))
    for (name, meaning), names in of.items():
        yield f"`--{name.replace('_', '-')}`", meaning, "all" if len(names) == most else ", ".join(names)


def outputs() -> dict[str, str]:
    """The text of the page."""
    lines = [*INTRODUCTION, "", *table(("drafter", "setting", "default", "meaning"), list(drafters()), left=4)]
    lines += [*TRAINING, "", *table(("option", "meaning", "methods"), list(training()), left=3)]
    return {PAGE: "\n".join(lines).rstrip() + "\n"}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
