"""The result record: what was run, on what, and how it is shown."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["SCHEMA", "environment", "markdown"]

SCHEMA = 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _instructions() -> list[str]:
    info = Path("/proc/cpuinfo")
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
    if not info.is_file():
        return []
    flags = next((line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("flags")), "")
    return [flag for flag in wanted if f" {flag} " in f"{flags} "]


def _commit() -> str:
    try:
        out = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return out.stdout.strip() or "unknown"


def _version() -> str:
    try:
        return version("anabranch")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unreleased"


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": _processor(),
        "instructions": _instructions(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "anabranch": _version(),
        "commit": _commit(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page: the command, the machine, one table of contenders and one by task."""
    run = result["run"]
    where = result["environment"]
    lines = [
        f"# {run['suite']}, {run['prompts']} prompts, {run['max_new_tokens']} new tokens, {run['dtype']}, batch 1",
        "",
        f"`{run['command']}`",
        "",
        f"{where['date']}, {where['processor']}, {where['threads']} threads "
        f"({', '.join(where['instructions'])}), torch {where['torch']}, transformers {where['transformers']}, "
        f"commit {where['commit']}.",
        "",
        "Speedup: tokens/s over our own plain decoding (`none`) on the same prompt, median and quartiles over prompts. "
        "Equal: prompts whose tokens equal plain decoding's.",
        "",
        "| contender | tokens/s | speedup (quartiles) | mean acceptance length "
        "| step ms (draft / forward / verify / commit) | equal |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for record in result["contenders"]:
        if "error" in record:
            lines.append(f"| {record['name']} | error: {record['error']} | | | | |")
            continue
        low, middle, high = record.get("speedup_quartiles") or ("-", "-", "-")
        parts = record.get("step_ms_by_part")
        step = "-" if parts is None else f"{record['step_ms']:.1f} ({' / '.join(f'{v:.1f}' for v in parts.values())})"
        lines.append(
            f"| {record['name']} | {record['tokens_per_second']:.1f} | {middle} ({low}-{high}) "
            f"| {record.get('mean_acceptance_length', '-')} | {step} | {record.get('equal_outputs', '-')} |"
        )
    good = [record for record in result["contenders"] if "error" not in record]
    if good:
        tasks = list(good[0]["by_task"])
        lines += ["", "Mean acceptance length and speedup by task:", ""]
        lines += ["| contender | " + " | ".join(tasks) + " |", "|---|" + "---:|" * len(tasks)]
        for record in good:
            cells = [
                f"{c.get('mean_acceptance_length', '-')} / {c.get('speedup', '-')}" for c in record["by_task"].values()
            ]
            lines.append(f"| {record['name']} | " + " | ".join(cells) + " |")
        lines += ["", "Share of drafted steps that accepted at least that many draft tokens:", ""]
        for record in good:
            if record.get("acceptance_by_depth"):
                lines.append(f"- {record['name']}: " + ", ".join(str(x) for x in record["acceptance_by_depth"]))
    return "\n".join(lines) + "\n"
