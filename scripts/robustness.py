"""Give the default model files and options that are wrong, one at a time, and report how each command ends.

Every case is a real run of the command line in a process of its own, on a copy of the default model, of the shipped
adapter or of the compiled kernels with one thing wrong. ``--before DIR`` runs another checkout beside this one, so
that a change can be shown case by case.

    python scripts/robustness.py --before ../base --out benchmarks/robustness.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabranch.model.fetch import default_model_dir
from anabranch.support.files import cache_home, write_atomically

HERE = Path(__file__).resolve().parents[1]
SHIPPED = HERE / "src" / "anabranch" / "adapters" / "smollm2-135m-instruct"
SECONDS = 120.0
MEMORY = 8 * 2**30  # bytes that a command may take
GENERATE = ("generate", "Name three rivers.", "--max-new-tokens", "24")


@dataclass(frozen=True)
class Case:
    """One thing that is wrong: ``prepare`` makes it in a scratch folder and returns the command's arguments.

    fresh  with no compiled kernels in the cache folder
    again  run the command once before, so that there is something to damage: ``prepare`` runs in between
    """

    name: str
    prepare: Callable[[Path], tuple[str, ...]]
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    again: bool = False


# -- models, adapters and kernels with one thing wrong ----------------------------------------------------------------
def model(scratch: Path, **changes: object) -> Path:
    """A copy of the default model whose config says something else; its weights are linked."""
    original, folder = default_model_dir(), scratch / "model"
    folder.mkdir()
    for path in original.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    rope = changes.pop("rope_parameters", {})
    assert isinstance(rope, dict)
    config |= {**changes, "rope_parameters": {**config["rope_parameters"], **rope}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def with_config(**changes: object) -> Callable[[Path], tuple[str, ...]]:
    return lambda scratch: (*GENERATE, "--drafter", "none", "--model", str(model(scratch, **changes)))


def nan_weights(scratch: Path) -> tuple[str, ...]:
    folder = model(scratch)
    weights = folder / "model.safetensors"
    tensors = load_file(weights.resolve())
    weights.unlink()
    tensors["model.layers.7.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    return (*GENERATE, "--drafter", "none", "--model", str(folder))


def adapter(
    change: Callable[[dict[str, Tensor], dict[str, object]], None],
) -> Callable[[Path], tuple[str, ...]]:
    """The shipped adapter with other tensors or another config; the SHA-256 is made to fit."""

    def prepare(scratch: Path) -> tuple[str, ...]:
        folder = scratch / "adapter"
        folder.mkdir()
        tensors = load_file(SHIPPED / "adapter.safetensors")
        record = json.loads((SHIPPED / "adapter_config.json").read_text(encoding="utf-8"))
        change(tensors, record["config"])
        save_file(tensors, folder / "adapter.safetensors", metadata={"format": "pt"})
        record["sha256"] = hashlib.sha256((folder / "adapter.safetensors").read_bytes()).hexdigest()
        (folder / "adapter_config.json").write_text(json.dumps(record), encoding="utf-8")
        return (*GENERATE, "--drafter", "streams:tree=8", "--adapter", str(folder))

    return prepare


def narrow_conditioner(tensors: dict[str, Tensor], streams: dict[str, object]) -> None:
    streams["conditioning_rank"] = 5
    for name in [name for name in tensors if name.startswith("conditioner.")]:
        rows = 5 if not name.endswith("to_state") else None
        columns = 5 if name.endswith(("to_state", "carry")) else None
        tensors[name] = tensors[name][:rows, :columns].contiguous()


def narrow_root(tensors: dict[str, Tensor], streams: dict[str, object]) -> None:
    streams["root_width"] = 5
    for name in ("root.main", "root.token"):
        tensors[name] = tensors[name][:5].contiguous()
    for name in ("root.up", "root.streams"):
        tensors[name] = tensors[name][:, :5].contiguous()


def integers(tensors: dict[str, Tensor], _: dict[str, object]) -> None:
    tensors["embeddings"] = tensors["embeddings"].to(torch.int32)


def no_vocabulary(tensors: dict[str, Tensor], _: dict[str, object]) -> None:
    del tensors["vocabulary"]


def nan_adapter(tensors: dict[str, Tensor], _: dict[str, object]) -> None:
    tensors["embeddings"][0, 0] = float("nan")


def damaged_kernels(damage: Callable[[bytes], bytes]) -> Callable[[Path], tuple[str, ...]]:
    def prepare(scratch: Path) -> tuple[str, ...]:
        for path in (scratch / "home" / "native").rglob("*.so"):
            path.write_bytes(damage(path.read_bytes()))
        return GENERATE

    return prepare


def many_streams(scratch: Path) -> tuple[str, ...]:
    answers = scratch / "answers.jsonl"
    lines = [{"id": i, "prompt_ids": [1, 2, 3 + i], "answer_ids": list(range(20, 32))} for i in range(6)]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = ("--recipe", "small", "--epochs", "0.05", "--held-out", "1", "--num-streams", "2000")
    return ("train", "streams", "--answers", str(answers), "--out", str(scratch / "out"), *options)


def plain(*arguments: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda scratch: arguments


def binary_input(scratch: Path) -> tuple[str, ...]:
    return ("generate", "-", "--max-new-tokens", "8")


def trace_of_nothing(scratch: Path) -> tuple[str, ...]:
    (scratch / "trace.jsonl").write_text("kept\n", encoding="utf-8")
    return (*GENERATE, "--trace", str(scratch / "trace.jsonl"))


CASES = (
    Case("adapter with `conditioning_rank` 5, drafts of 8 nodes", adapter(narrow_conditioner)),
    Case("adapter with `root_width` 5, drafts of 8 nodes", adapter(narrow_root)),
    Case("`partial_rotary_factor` 4.0", with_config(rope_parameters={"partial_rotary_factor": 4.0})),
    Case(
        "the same without native kernels",
        with_config(rope_parameters={"partial_rotary_factor": 4.0}),
        {"ANABRANCH_NATIVE": "0"},
    ),
    Case("cached kernels cut to 300 KB", damaged_kernels(lambda data: data[:300_000]), again=True),
    Case("cached kernels of random bytes", damaged_kernels(lambda data: os.urandom(len(data))), again=True),
    Case("`train streams --num-streams 2000`", many_streams),
    Case("adapter tensor cast to int32", adapter(integers)),
    Case("adapter without its vocabulary", adapter(no_vocabulary)),
    Case("adapter with a NaN", adapter(nan_adapter)),
    Case('config with `"hidden_size": "576"`', with_config(hidden_size="576")),
    Case("config with 1,000,000 layers", with_config(num_hidden_layers=1_000_000)),
    Case("config with `rope_theta` 0.0", with_config(rope_parameters={"rope_theta": 0.0})),
    Case("weights with a NaN in one layer", nan_weights),
    Case("no C++ compiler", plain(*GENERATE), {"PATH": "", "CXX": ""}, fresh=True),
    Case("cache folder that cannot be written", plain(*GENERATE), {"READ_ONLY_HOME": "1"}),
    Case("`CXX` of two words", plain(*GENERATE), {"CXX": "env g++"}, fresh=True),
    Case("invalid UTF-8 on standard input", binary_input),
    Case("`--trace` to a file that exists", trace_of_nothing),
)


# -- running ----------------------------------------------------------------------------------------------------------
def ended(case: Case, source: Path) -> str:
    """How the command of a case ends with the package in ``source``: its status and the last line that it says."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        home = scratch / "home"
        home.mkdir()
        (home / "models").symlink_to(cache_home() / "models")
        if not (case.fresh or case.again):
            (home / "native").symlink_to(cache_home() / "native")
        environment = os.environ | {"PYTHONPATH": str(source), "ANABRANCH_HOME": str(home), "COLUMNS": "200"}
        environment |= case.environment
        if environment.pop("READ_ONLY_HOME", ""):
            environment["ANABRANCH_HOME"] = str(unwritable(scratch))
        if case.again:
            run(GENERATE, environment)
        return run(case.prepare(scratch), environment)


def unwritable(scratch: Path) -> Path:
    """A cache folder in which nothing new can be made, by root neither: its folders for files are files."""
    home = scratch / "unwritable"
    home.mkdir()
    (home / "models").symlink_to(cache_home() / "models")
    for name in ("native", "profiles"):
        (home / name).write_text("", encoding="utf-8")
    return home


def run(arguments: tuple[str, ...], environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", "from anabranch.cli import main; main()", *arguments]
    try:
        done = subprocess.run(
            command,
            env=environment,
            input=b"\xff\xfe river",
            capture_output=True,
            timeout=SECONDS,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS:.0f} s"
    said = (done.stderr or done.stdout).decode("utf-8", "replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    warned = [line for line in lines if line.startswith("warning:")]
    last = (warned or lines or ["nothing said"])[-1]
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}: {last}"
    if "Traceback (most recent call last)" in said:
        return f"traceback: {last}"
    if done.returncode == 0 and not done.stdout.strip():
        return f"exit 0, no text: {last}"
    return f"exit {done.returncode}: {last}"


def shown(text: str, scratch_names: tuple[str, ...] = ("/tmp/",)) -> str:
    """For a table: no folders of this machine, no bars."""
    words = [Path(word).name if word.startswith(scratch_names) else word for word in text.split(" ")]
    return " ".join(words).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout to run beside this one")
    parser.add_argument("--only", type=int, help="the case of that number alone")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    args = parser.parse_args()
    default_model_dir()
    checkouts = ([] if args.before is None else [("before", args.before.resolve())]) + [("now", HERE)]
    lines = [
        "| what is wrong | " + " | ".join(name for name, _ in checkouts) + " |",
        "|---" * (len(checkouts) + 1) + "|",
    ]
    for number, case in enumerate(CASES, 1):
        if args.only not in (None, number):
            continue
        ends = [shown(ended(case, checkout / "src")) for _, checkout in checkouts]
        lines.append(f"| {case.name} | " + " | ".join(ends) + " |")
        print(lines[-1], flush=True)
    if args.out is not None:
        command = "python scripts/robustness.py" + (" --before DIR" if args.before else "")
        title = f"# How commands end when something is wrong\n\nPrinted by `{command}`; `generate` unless said.\n\n"
        write_atomically(args.out, title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
