"""Read GGUF files as Hugging Face checkpoints: config, tensors under Hugging Face names, tokenizer.

    contents = read_gguf("model.gguf", dtype=torch.bfloat16)
    contents.config["model_type"]                                # "llama"
    contents.tensors["model.layers.0.self_attn.q_proj.weight"]   # dequantised on access
    contents.tokenizer("12345")

llama.cpp's converter does more than rename tensors: it reorders or shifts some of them, which is undone here (rotary
rows of Llama, the ``+ 1`` of Gemma's norms, the transposes of GPT-2). Unknown features raise an error, since ignoring
one would silently change the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from anabranch.errors import FileError, ModelError
from anabranch.model.gguf_tokenizer import build_tokenizer

__all__ = ["GGUFContents", "GGUFTensors", "read_gguf", "unpermute_rotary"]

Metadata = Mapping[str, Any]

# Names of the modules inside one block.
_GATED_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GATED_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class _Family:
    """How llama.cpp stores one architecture: names, settings that are not in the file, and changes to undo."""

    class_name: str
    block: dict[str, str]
    ends: dict[str, str]
    layer_prefix: str = "model.layers"
    fixed: Mapping[str, Any] | None = None
    rotary_rows_interleaved: bool = False
    norms_plus_one: bool = False
    transposed: frozenset[str] = frozenset()


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _GATED_BLOCK, _GATED_ENDS, rotary_rows_interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM", _GATED_BLOCK, _GATED_ENDS),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        _GATED_BLOCK | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        _GATED_ENDS,
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        {k: v for k, v in _GATED_BLOCK.items() if k not in {"attn_q", "attn_k", "attn_v", "ffn_gate"}}
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        _GATED_ENDS,
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        _GATED_BLOCK
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _GATED_ENDS,
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        norms_plus_one=True,
    ),
    "gpt2": _Family(
        "GPT2LMHeadModel",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer_prefix="transformer.h",
        fixed={"activation_function": "gelu_new"},
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}

# Part of the config or derived from it, not parameters.
_NOT_PARAMETERS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_END_NAME = re.compile(r"(\w+)\.(weight|bias)")


class GGUFContents(NamedTuple):
    """A GGUF file in Hugging Face form: the ``config.json`` record, the parameters, a transformers tokenizer."""

    config: dict[str, Any]
    tensors: GGUFTensors
    tokenizer: Any


class GGUFTensors(Mapping[str, torch.Tensor]):
    """Parameters by Hugging Face name and in Hugging Face layout, dequantised on every access.

    Only one tensor at a time is held in float32, never the whole model.
    """

    def __init__(self, loaders: dict[str, Callable[[], torch.Tensor]]) -> None:
        self._loaders = loaders

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


def read_gguf(path: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> GGUFContents:
    """Open a GGUF file. Tensors are dequantised to float32 and rounded once to ``dtype``.

    Raises:
        FileError: the file is missing, truncated or malformed.
        ModelError: the architecture, the tokenizer or a feature of the file is not supported.
    """
    path = Path(path)
    reader = _open(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError) as error:
        raise FileError(f"{path} is a damaged GGUF file ({error}); fetch it again") from error
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{path} contains a model of architecture {architecture!r}; supported are {known}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(architecture, metadata, stored)
        loaders = _loaders(architecture, config, stored, path=path, dtype=dtype)
    except KeyError as error:
        raise FileError(
            f"{path} lacks the metadata field {error} and so is not a complete model; fetch it again"
        ) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise FileError(f"{path} has inconsistent metadata ({error}); fetch it again") from error
    tokenizer = build_tokenizer(path, metadata)
    config["dtype"] = str(dtype).removeprefix("torch.")
    return GGUFContents(config, GGUFTensors(loaders), tokenizer)


def unpermute_rotary(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a q or k projection from interleaved pairs to the two halves that Hugging Face rotates.

    Args:
        rows: (heads * E, ...), in which each head's channels are stored in the order 0, E/2, 1, E/2 + 1, ...
        heads: number of heads in ``rows``.

    One head of E = 4: file rows ``[0 2 1 3]`` (pairs 0-2 and 1-3) -> ``[0 1 2 3]``.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    halves: np.ndarray[Any, Any] = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves


class _BoundedReader(GGUFReader):  # type: ignore[misc]  # gguf has no type annotations
    """The reader of the ``gguf`` package, with a check that reads stay inside the file.

    The original silently slices past the end, so a damaged array length makes it loop for hours.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"it ends at byte {self.data.size}, but byte {end} is needed")
        return super()._get(offset, dtype, count, *args, **kwargs)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileError(f"there is no GGUF file at {path}; give the path of an existing file")
    try:
        reader = _BoundedReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, OSError) as error:
        detail = str(error).strip().rstrip(".")
        raise FileError(f"{path} is not a GGUF file, or is truncated or damaged ({detail}); fetch it again") from error
    if reader.byte_order == "S":
        raise ModelError(f"{path} has the opposite byte order; convert it to this machine's byte order")
    return reader


def _config(architecture: str, metadata: Metadata, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face ``config.json`` record of the file. Raises KeyError for a missing field."""

    def need(key: str) -> Any:
        return metadata[f"{architecture}.{key}"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    family = _FAMILIES[architecture]
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": architecture,
        "vocab_size": int(get("vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
        # llama.cpp stores the output head only if it differs from the embedding
        "tie_word_embeddings": "output.weight" not in stored,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        **(family.fixed or {}),
    }
    if architecture == "gpt2":
        return config | {
            "n_layer": need("block_count"),
            "n_positions": need("context_length"),
            "n_embd": need("embedding_length"),
            "n_inner": get("feed_forward_length"),
            "n_head": need("attention.head_count"),
            "layer_norm_epsilon": _shortest(need("attention.layer_norm_epsilon")),
        }
    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = get("attention.key_length") or get("rope.dimension_count") or hidden // heads
    config |= {
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(get, stored, head_dim=head_dim),
    }
    if architecture != "gemma2":
        config["hidden_act"] = "silu"
    if architecture in {"llama", "qwen2"}:
        # Whether a Llama-like model has biases is visible only in its tensors; Qwen2 always has them.
        config["attention_bias"] = "blk.0.attn_q.bias" in stored
        config["mlp_bias"] = "blk.0.ffn_up.bias" in stored
    if get("attention.sliding_window"):
        config["sliding_window"] = get("attention.sliding_window")
    if architecture == "gemma2":
        config |= {
            "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": get("final_logit_softcapping", 30.0),
            # not stored in the file: the 27B (46 layers) scales by hidden size / heads, the others by head_dim
            "query_pre_attn_scalar": hidden // heads if need("block_count") == 46 else head_dim,
        }
    return config


def _rope(get: Callable[..., Any], stored: Mapping[str, Any], *, head_dim: int) -> dict[str, Any]:
    """The Hugging Face ``rope_parameters``. Raises ModelError for a variant that cannot be recovered from the file."""
    theta = float(get("rope.freq_base", 10_000.0))
    kind = get("rope.scaling.type", "none")
    long_short = [name for name in stored if name.startswith("rope_factors_")]
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(get("rope.scaling.factor"))}
    if kind not in {"none", None} or long_short:
        raise ModelError(
            f"this GGUF file scales rotary positions ({kind if not long_short else 'longrope'}) in a way that cannot "
            "be recovered exactly; load the model's safetensors folder instead"
        )
    if "rope_freqs.weight" not in stored:
        return {"rope_type": "default", "rope_theta": theta}
    return _llama3_rope(np.asarray(stored["rope_freqs.weight"].data, dtype=np.float64), theta, head_dim=head_dim)


def _llama3_rope(divisors: np.ndarray[Any, Any], theta: float, *, head_dim: int) -> dict[str, Any]:
    """Llama 3's ``rope_parameters`` from its per-frequency divisors (E/2,); a GGUF file stores only these."""
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    # 1 above the high frequency, `factor` below the low one, interpolated in the frequency between them
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(
            "this GGUF file scales rotary frequencies by a table other than Llama 3's; "
            "load the model's safetensors folder instead"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """Convert a float32 field to the shortest decimal that rounds to it: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _loaders(
    architecture: str, config: Mapping[str, Any], stored: Mapping[str, Any], *, path: Path, dtype: torch.dtype
) -> dict[str, Callable[[], torch.Tensor]]:
    """One loader for each parameter. Raises FileError if a block is missing, ModelError for an unknown tensor."""
    family = _FAMILIES[architecture]
    loaders: dict[str, Callable[[], torch.Tensor]] = {}
    blocks: set[int] = set()
    for name, tensor in stored.items():
        if _NOT_PARAMETERS.fullmatch(name):
            continue
        if match := _BLOCK_NAME.fullmatch(name):
            block, leaf, kind = int(match[1]), match[2], match[3]
            blocks.add(block)
            prefix, target = f"{family.layer_prefix}.{block}.", family.block.get(leaf)
        elif match := _END_NAME.fullmatch(name):
            leaf, kind = match[1], match[2]
            prefix, target = "", family.ends.get(leaf)
        else:
            leaf, kind, prefix, target = name, "", "", None
        if target is None:
            raise ModelError(
                f"{path} contains the unknown tensor {name!r}, so its {architecture} model is not supported; use the "
                "model's safetensors folder instead"
            )
        loader = _loader(tensor, family, config, leaf=leaf, kind=kind, path=path, dtype=dtype)
        loaders[f"{prefix}{target}.{kind}"] = loader
    layers = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    if (len(blocks), max(blocks, default=-1)) != (
        layers,
        layers - 1,
    ) or f"{family.ends['token_embd']}.weight" not in loaders:
        raise FileError(f"{path} should contain {layers} blocks but has {len(blocks)}; fetch it again")
    return loaders


def _loader(
    tensor: Any, family: _Family, config: Mapping[str, Any], *, leaf: str, kind: str, path: Path, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """A function that dequantises one tensor and undoes the changes of llama.cpp's converter."""

    def load() -> torch.Tensor:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind_name = getattr(tensor.tensor_type, "name", tensor.tensor_type)
            raise ModelError(
                f"{path} stores {tensor.name} as {kind_name}, which cannot be dequantised; use a file in another format"
            ) from error
        if family.rotary_rows_interleaved and leaf in {"attn_q", "attn_k"}:
            heads = int(config["num_attention_heads" if leaf == "attn_q" else "num_key_value_heads"])
            if heads < 1 or values.shape[0] % (2 * heads):
                raise FileError(f"{path} has {values.shape[0]} rows in {tensor.name} for {heads} heads; fetch it again")
            values = unpermute_rotary(values, heads)
        if family.norms_plus_one and leaf.endswith("norm"):
            values = values - np.float32(1)
        if kind == "weight" and leaf in family.transposed:
            values = values.T
        # a copy, since the file is mapped read-only and may be replaced while the model is in use
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C")).to(dtype)

    return load
