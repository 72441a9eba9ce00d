"""``anabranch certify``: compare a drafter's output with plain decoding, token by token or as a distribution."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options
from anabranch.cli.configured import configured
from anabranch.declared import Keywords, check
from anabranch.errors import InputError
from anabranch.loading import LoadConfig
from anabranch.support.files import check_output, write_atomically

if TYPE_CHECKING:
    from anabranch.certify import Certificate, Design, SamplingCertificate
    from anabranch.loading import Loaded
    from anabranch.methods import Spec
    from anabranch.prompts import TextOrMessages
    from anabranch.support.table import Table

__all__ = ["CertifyConfig", "DistributionTest", "certify"]

ROWS, SAMPLED_ROWS = 1, 32


@dataclass(frozen=True, kw_only=True)
class DistributionTest:
    """The options of ``--sampling``."""

    rule: Annotated[str, typer.Option(help="with --sampling: verify drafts by this rule: match or rejection")] = "match"
    effect: Annotated[float, typer.Option(help="with --sampling: find differences of this effect size (Cohen's w)")] = (
        0.2
    )
    alpha: Annotated[
        float, typer.Option(help="with --sampling: keep the probability of any false alarm below this")
    ] = 0.01
    power: Annotated[
        float, typer.Option(help="with --sampling: find a difference of that size with this probability")
    ] = 0.95
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="with --sampling: write a page with all tests")] = (
        None
    )

    @property
    def design(self) -> Design:
        """The sensitivity of the tests. Raises InputError for a value out of range."""
        from anabranch.certify import Design

        check({"rule": self.rule})
        return Design(self.effect, self.alpha, self.power)


@dataclass(frozen=True, kw_only=True)
class CertifyConfig:
    """The options of ``anabranch certify``."""

    loading: LoadConfig = field(default=LoadConfig())
    drafter: options.Drafter = "auto"
    prompts: options.Prompts = field(default=options.Prompts())
    max_new_tokens: options.NewTokens = 64
    rows: Annotated[
        int | None,
        typer.Option(help=f"decode this many at a time (default: {ROWS}, with --sampling {SAMPLED_ROWS})"),
    ] = None
    sampling: Keywords = field(default_factory=options.sampling)
    distribution: Annotated[
        bool, typer.Option("--sampling", help="test the distribution of sampled tokens statistically")
    ] = False
    test: DistributionTest = field(default=DistributionTest())
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the result to FILE.json")] = None
    force: options.Force = False
    as_json: options.AsJson = False


@configured
def certify(config: CertifyConfig) -> None:
    """Check that a drafter does not change the output. The exit status is the verdict: 0 if it does not.

    Decodes every prompt plainly and with the drafter, and explains the first token that differs: a tie if both
    tokens' logits are within the target's own rounding error, a BUG otherwise. At a temperature above 0 both use the
    same seed, which must give the same text.

    --sampling tests the distribution instead: it draws many samples with different seeds after one context of each
    prompt, with the drafter and by plain decoding, and compares them by chi-square tests. A deliberately wrong rule
    must be found, or the result is inconclusive.
    """
    from anabranch.cli.layout import status_console
    from anabranch.cli.show import name_defaults
    from anabranch.methods import parse_spec, resolve_spec
    from anabranch.model.kernel_use import near_ties

    # check everything possible before a model is loaded
    parse_spec(config.drafter)
    options.check_at_least(1, max_new_tokens=config.max_new_tokens, rows=config.rows)
    _check(config)
    suite = config.prompts.read()
    loaded = options.load(config.loading)
    name_defaults(loaded.target)
    if said := near_ties(loaded.target.decoder):
        status_console().print(said)
    drafter = resolve_spec(config.drafter, *loaded.modules)
    if config.distribution:
        _distribution(config, loaded, drafter, [prompt.asked for prompt in suite])
    else:
        _tokens(config, loaded, drafter, [(prompt.asked, prompt.task) for prompt in suite])


def _check(config: CertifyConfig) -> None:
    """Check the options of one mode or the other. Raises InputError or FileError."""
    from anabranch.bench.journal import beside

    if config.out is not None:
        check_output(beside(config.out, ".json"), force=config.force)
    sampling = options.params(config.sampling)
    if not config.distribution:
        if config.test != DistributionTest():
            raise InputError("--rule, --effect, --alpha, --power and --html are for the test of --sampling; add it")
        return
    _ = config.test.design
    if sampling.greedy:
        raise InputError("--sampling tests a distribution, and temperature 0 has none; give --temperature 1, say")
    if config.test.html is not None:
        check_output(config.test.html, force=config.force, what="the page", option="--html")


def _ids(config: CertifyConfig, loaded: Loaded, text: TextOrMessages) -> list[int]:
    from anabranch.prompts import chat_ids

    return chat_ids(loaded.target.tokenizer, text, raw=config.prompts.raw, model=loaded.target.name)


# -- the same tokens -----------------------------------------------------------------------------------------------
def _tokens(config: CertifyConfig, loaded: Loaded, drafter: Spec, prompts: list[tuple[TextOrMessages, str]]) -> None:
    from anabranch.certify import certify as run
    from anabranch.cli.layout import say, status_console

    console = status_console()

    def report(certificate: Certificate) -> None:
        where = ""
        if certificate.at is not None:
            where = f" at token {certificate.at}: margin {certificate.margin}, rounding {certificate.noise}"
        console.print(
            f"{certificate.prompt + 1}/{len(prompts)} {prompts[certificate.prompt][1]}: {certificate.verdict}{where}"
        )

    certificates = run(
        loaded.target,
        loaded.modules,
        drafter,
        [_ids(config, loaded, text) for text, _ in prompts],
        max_new_tokens=config.max_new_tokens,
        call=config.sampling,
        rows=config.rows or ROWS,
        report=report,
    )
    counts = {verdict: sum(c.verdict == verdict for c in certificates) for verdict in ("equal", "tie", "BUG")}
    record = {"drafter": str(drafter), "counts": counts, "prompts": [asdict(c) for c in certificates]}
    _write(config, loaded, record)
    if config.as_json:
        print(json.dumps(record))
    else:
        said = f"{counts['equal']} equal, {counts['tie']} ties, {counts['BUG']} bugs"
        say(f"{said} of {len(certificates)} prompts with {drafter}")
    raise typer.Exit(1 if counts["BUG"] else 0)


def _write(config: CertifyConfig, loaded: Loaded, record: dict[str, Any]) -> None:
    """Write the result to ``--out`` if it is given, with the model, the prompts' source and the environment."""
    from anabranch.bench.journal import beside
    from anabranch.bench.report import environment
    from anabranch.cli.bench_contenders import command
    from anabranch.cli.layout import status_console
    from anabranch.support.files import without_folders

    if config.out is None:
        return
    target, path = loaded.target, beside(config.out, ".json")
    certified = {
        "model": without_folders(config.loading.model),
        "fingerprint": target.fingerprint,
        "quantize": target.quantize,
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "suite": Path(config.prompts.suite).name,
        "max_new_tokens": config.max_new_tokens,
    }
    named = [name for name in ("model", "drafter") if name in record]
    record = record | {name: without_folders(record[name]) for name in named}
    result = {"command": command(), "environment": environment(target.decoder.device), "certified": certified, **record}
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    status_console().print(f"wrote {path}")


# -- the same distribution -----------------------------------------------------------------------------------------
def _distribution(config: CertifyConfig, loaded: Loaded, drafter: Spec, prompts: list[TextOrMessages]) -> None:
    from anabranch.certify import certify_sampling, html_page
    from anabranch.cli.layout import print_tables, say, status_console

    certificate = certify_sampling(
        loaded.target,
        loaded.modules,
        drafter,
        [_ids(config, loaded, text) for text in prompts],
        call={**config.sampling, "rule": "rejection" if config.test.rule == "rejection" else "match"},
        design=config.test.design,
        max_new_tokens=config.max_new_tokens,
        rows=config.rows or SAMPLED_ROWS,
        report=status_console().print,
    )
    if config.test.html is not None:
        page = html_page(certificate, loaded.target.title, lambda ids: str(loaded.target.tokenizer.decode(list(ids))))
        write_atomically(config.test.html, page)
    record = {"model": loaded.target.title, **certificate.to_dict()}
    _write(config, loaded, record)
    if config.as_json:
        print(json.dumps(record))
    else:
        print_tables([_table(certificate)])
        say(f"{certificate.verdict}: {certificate.reason} ({certificate.drafter}, rule {certificate.rule})")
    raise typer.Exit(0 if certificate.verdict == "lossless" else 1)


def _table(certificate: SamplingCertificate) -> Table:
    """One row for each test of the drafter, with the p-value of the wrong rule beside it."""
    from anabranch.certify import DRAFTER
    from anabranch.support.table import Table

    titles = ("context", "tokens", "cells", "chi-square", "p", "total\nvariation", "noise", "wrong rule's\np")
    wrong = {(each.context, each.tokens): each for each in certificate.findings if each.arm != DRAFTER}
    rows = [
        (
            each.context + 1,
            each.tokens,
            len(each.cells),
            f"{each.test.statistic:.1f}",
            f"{each.test.p_value:.2g}",
            f"{each.total_variation:.4f}",
            f"{each.noise:.4f}",
            f"{wrong[each.context, each.tokens].test.p_value:.2g}",
        )
        for each in certificate.findings
        if each.arm == DRAFTER
    ]
    return Table(titles, rows, f"{certificate.samples:,} samples per arm and context", left=0)
