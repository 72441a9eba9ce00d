"""``anabranch bench --task``: the quality of answers, and examples with tokens by what proposed them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.bench.application import Application
    from anabranch.bench.session import Session
    from anabranch.cli.bench_config import Weights

__all__ = ["score", "show_examples", "write_page"]

LONGEST = 400  # characters of a prompt that are shown in a terminal


def score(result: dict[str, Any], session: Session, application: Application, weights: Weights) -> None:
    """Add quality and extra parameters to the contenders of a result."""
    from anabranch.bench.quality import add_quality, extra_parameters

    tokenizer = session.target.tokenizer

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    add_quality(result["contenders"], session.answers(), application, decode, baseline=session.baseline)
    entries = {entry.name: entry for entry in session.entries}
    for record in result["contenders"]:
        entry = entries[record["name"]]
        if entry.kind == "ours":
            record["extra_parameters"] = extra_parameters(entry.spec, weights.loaded[entry.weights])


def write_page(path: Path, result: dict[str, Any], session: Session, application: Application) -> Path:
    """Write the tables and the examples as a web page; returns its path."""
    from anabranch.bench.task_page import task_page
    from anabranch.support.files import write_atomically

    write_atomically(path, task_page(result, application, session.examples(), session.target.tokenizer))
    return path


def show_examples(session: Session, application: Application) -> None:
    """Print the examples: prompt, reference, and what each contender that drafts made of it."""
    from anabranch.cli.layout import output
    from anabranch.cli.show import Marker, for_stdout
    from anabranch.cli.wrapping import wrapped
    from anabranch.decoding.stats import Stats

    console = output()
    for index, answers in enumerate(session.examples()):
        row = application.rows[index]
        prompt = textwrap.shorten(row.prompt, LONGEST, placeholder=" ...")
        console.print()
        console.print(for_stdout(f"Example {row.name}: {prompt}"))
        console.print(for_stdout(f"reference: {row.references[0]}"))
        for name, answer in answers.items():
            if not any(one.rejected or len(one.tokens) > 1 for one in answer.passes):
                continue
            marker = Marker(session.target.tokenizer)
            last = len(answer.passes) - 1
            text = "".join(
                marker.tokens(one.tokens, one.sources, last=place == last) for place, one in enumerate(answer.passes)
            )
            stats = answer.stats or Stats()
            # not the console's print, which would count the colours as characters
            print(wrapped(f"{name} ({stats.mean_acceptance_length:.2f} tokens per target pass): {text}"))
            print(marker.legend(stats))
