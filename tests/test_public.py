"""The names that users rely on: what is documented exists, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import anabranch
from toy_text import ToyFolders, toy_model

METHODS = [
    *("generate", "stream", "chat", "chat_stream", "chat_ids", "agenerate", "astream", "achat", "achat_stream"),
    *("close", "target", "threads", "tokenizer"),
]


def test_public_names_exist_and_are_sorted() -> None:
    assert sorted(anabranch.__all__) == anabranch.__all__
    for name in anabranch.__all__:
        assert getattr(anabranch, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = anabranch.nonsense


def test_public_names_are_documented() -> None:
    for name in anabranch.__all__:
        thing = getattr(anabranch, name)
        if not isinstance(thing, str):
            assert inspect.getdoc(thing), name
    for name in METHODS:
        assert inspect.getdoc(getattr(anabranch.Model, name)), name


def test_dir_shows_what_is_loaded_late() -> None:
    assert set(anabranch.__all__) <= set(dir(anabranch))
    assert not [name for name in dir(anabranch) if name.startswith("_") and not name.startswith("__")]


def test_load_takes_the_documented_keywords() -> None:
    parameters = inspect.signature(anabranch.load).parameters
    names = ["name", "drafter", "adapter", "dtype", "device", "quantize", "revision", "threads", "lora", "loras"]
    names += ["adapters", "cache", "kv"]
    assert list(parameters) == names
    assert parameters["name"].default == "default"
    assert parameters["drafter"].default is None, "what tune found, else auto"
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "name")


def test_a_result_has_the_documented_names() -> None:
    model = toy_model()
    out = model.generate("the", max_new_tokens=6, temperature=0.0, seed=0)
    assert isinstance(out.token_ids, list)
    assert isinstance(out.text, str)
    assert out.finish_reason in ("stop", "length")
    assert out.stats.mean_acceptance_length == out.stats.tokens / out.stats.steps
    assert out.stats.tokens_per_second > 0
    chunk = next(iter(model.stream("the", max_new_tokens=6)))
    assert isinstance(chunk.text, str)
    assert chunk.token_ids == chunk.step.tokens
    assert len(chunk.sources) == len(chunk.token_ids)


def test_importing_is_light() -> None:
    code = "import sys, anabranch, anabranch.cli, anabranch.errors\n"
    code += "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.thorough
def test_the_compiler_stays_out(toys: ToyFolders) -> None:
    """Importing it costs 110 MB and a second; neither loading nor decoding on a CPU needs it."""
    code = f"""if True:
        import sys, anabranch
        model = anabranch.load({str(toys.model)!r}, adapter={str(toys.adapter)!r}, device="cpu")
        model.generate("One, two,", max_new_tokens=4)
        sys.exit(", ".join({{"sympy", "torch._dynamo", "torch._inductor"}} & set(sys.modules)) or 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
