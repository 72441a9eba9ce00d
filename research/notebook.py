"""Run a notebook's cells and keep their outputs, without Jupyter.

    python research/notebook.py examples/tour.ipynb            # run, and write the outputs into the file
    python research/notebook.py examples/tour.ipynb --check    # run, write nothing

Cells share one namespace. Kept are what a cell prints, its last expression (as text and, where it has a form for
notebooks, as HTML), and matplotlib figures that are open at its end, as PNG.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

__all__ = ["code_cells", "run"]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that hold code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> None:
    """Run all code cells in order and replace their outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        cell["outputs"] = _run_cell("".join(cell["source"]), namespace, f"cell {number}", number)
        cell["execution_count"] = number


def _run_cell(source: str, namespace: dict[str, Any], name: str, number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append({"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}})
    return outputs + _figures()


def _figures() -> list[dict[str, Any]]:
    plots = sys.modules.get("matplotlib.pyplot")
    found = []
    for number in plots.get_fignums() if plots else ():
        image = io.BytesIO()
        plots.figure(number).savefig(image, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    if plots:
        plots.close("all")
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true", help="run the cells, write nothing")
    arguments = parser.parse_args()
    notebook = json.loads(arguments.notebook.read_text(encoding="utf-8"))
    run(notebook)
    if not arguments.check:
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        arguments.notebook.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
