"""The shared style of figures: its files, and that it is applied and removed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anabranch.errors import CapabilityError
from anabranch.support import plots


def test_both_files_of_a_figure_and_the_same_figure_twice(tmp_path: Path) -> None:
    written = []
    for name in ("one.two", "again"):
        with plots.styled():
            figure = plots.new_figure(3, 2)
            axes = figure.add_subplot()
            plots.grid(axes, "x")
            axes.plot([1, 2], [2, 1], color=plots.BLUE, label="a line")
            axes.legend()
        written += plots.save_both(figure, tmp_path / "made" / name)
    assert [path.name for path in written] == ["one.two.png", "one.two.svg", "again.png", "again.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in written[1].read_text(encoding="utf-8")
    assert written[1].read_bytes() == written[3].read_bytes(), "no date and no random names"


def test_the_look_is_left_behind() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with plots.styled():
        assert not matplotlib.rcParams["axes.spines.top"]
    assert dict(matplotlib.rcParams) == before


def test_lines_differ_in_colour_and_marker() -> None:
    colours, markers = zip(*plots.LINES, strict=True)
    assert len(set(colours)) == len(set(markers)) == len(plots.LINES)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    plots.check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CapabilityError, match=r"pip install 'anabranch\[figures\]', or draw by hand$"):
        plots.check_matplotlib("or draw by hand")
