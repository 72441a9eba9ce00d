"""``anabranch certify``: compare a drafter's output with plain decoding and explain every difference."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured

if TYPE_CHECKING:
    from anabranch.certify import Certificate

__all__ = ["CertifyConfig", "certify"]


@dataclass(frozen=True, kw_only=True)
class CertifyConfig:
    """The options of ``anabranch certify``."""

    loading: options.Loading = field(default=options.Loading())
    drafter: options.Drafter = "auto"
    prompts: options.Prompts = field(default=options.Prompts())
    max_new_tokens: options.NewTokens = 64
    sampling: options.Sampling = field(default=options.Sampling())
    as_json: options.AsJson = False


@configured
def certify(config: CertifyConfig) -> None:
    """Check that a drafter does not change the output.

    Decodes every prompt plainly and with the drafter, and explains the first token that differs: a tie if both
    tokens' logits are within the target's own rounding error, a BUG otherwise. Exits with status 1 if there is a BUG.

    At a temperature above 0 both use the same seed, which must give the same text.
    """
    from rich.console import Console

    from anabranch.certify import certify as run
    from anabranch.methods import parse_spec, resolve_spec
    from anabranch.prompts import chat_ids

    # check everything possible before a model is loaded
    parse_spec(config.drafter)
    options.check_at_least(1, max_new_tokens=config.max_new_tokens)
    sampling = config.sampling.params
    suite = config.prompts.read()
    loaded = options.load(config.loading)
    target, drafter = loaded.target, resolve_spec(config.drafter, *loaded.modules)
    console = Console(stderr=True)

    def report(found: Certificate) -> None:
        where = ""
        if found.at is not None:
            where = f" at token {found.at}: margin {found.margin}, rounding {found.noise}"
        console.print(f"{found.prompt + 1}/{len(suite)} {suite[found.prompt].task}: {found.verdict}{where}")

    found = run(
        target,
        loaded.modules,
        drafter,
        [chat_ids(target.tokenizer, prompt.text, raw=config.prompts.raw) for prompt in suite],
        max_new_tokens=config.max_new_tokens,
        sampling=sampling,
        report=report,
    )
    counts = {verdict: sum(c.verdict == verdict for c in found) for verdict in ("equal", "tie", "BUG")}
    if config.as_json:
        print(json.dumps({"drafter": str(drafter), "counts": counts, "prompts": [asdict(c) for c in found]}))
    else:
        said = f"{counts['equal']} equal, {counts['tie']} ties, {counts['BUG']} bugs"
        print(f"{said} of {len(found)} prompts with {drafter}")
    raise typer.Exit(1 if counts["BUG"] else 0)
