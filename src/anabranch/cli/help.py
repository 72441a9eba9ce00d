"""Help texts that fit any terminal, for the program and every verb.

Typer's panels cut the names of options off in narrow terminals, and click's list of commands cuts sentences off.
``typer.Typer(**HELP)`` shows plain paragraphs instead: names are whole at any width, and texts are wrapped.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

__all__ = ["HELP"]


class _Verbs(TyperGroup):
    """Lists its verbs with the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and sentences as a list of two columns."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_sentence(verb.help or "")) for name, verb in verbs if verb is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n", 1)[0].split()).split(". ", 1)[0].rstrip(".")


HELP: dict[str, Any] = {
    "rich_markup_mode": None,
    "cls": _Verbs,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Keywords for ``typer.Typer``; verbs and groups inside take the first and the last from the program's."""
