"""Write docs/settings.md, the settings of all drafters, from their dataclasses.

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
from anabranch.methods import methods
from benchmark_tables import table
from generated import write_or_check

PAGE = "docs/settings.md"
PAGES = {"draft_model", "eagle", "hydra", "lookahead", "medusa", "ngram", "prompt_lookup", "quantized_draft"}
PAGES |= {"rest", "space", "staged", "streams", "suffix"}
INTRODUCTION = """# Settings

Made from the code by `python research/settings_page.py`; `train METHOD --help` lists those of trainings.

## Drafters

Settings follow the name of a drafter: `streams:tree=32,prune=16`.
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


def outputs() -> dict[str, str]:
    """The text of the page."""
    lines = [*INTRODUCTION, "", *table(("drafter", "setting", "default", "meaning"), list(drafters()), left=4)]
    return {PAGE: "\n".join(lines).rstrip() + "\n"}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
