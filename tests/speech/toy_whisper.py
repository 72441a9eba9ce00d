"""A toy Whisper: byte-level tokens with Whisper's special ones, random weights, and its folder for CTranslate2."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LANGUAGES = ("en", "de", "haw")
TIMES = [f"<|{each / 50:.2f}|>" for each in range(151)]
SIZES = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16}
HEADS, FFN, TARGETS, FRAMES = 2, 96, 40, 300  # windows of 3 s


def whisper_tokenizer() -> Any:
    """Byte-level BPE: 256 bytes, then Whisper's special tokens and its timestamps."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    special += ["<|notimestamps|>", *TIMES]
    core.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def whisper_hf(tokenizer: Any) -> Any:
    """transformers' model of toy size, with weights that decode varied text and end."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("endoftext", "startoftranscript")}
    end, start = ids["endoftext"], ids["startoftranscript"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        **SIZES,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        max_target_positions=TARGETS,
        max_source_positions=FRAMES // 2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(3)
    model = WhisperForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "encoder.embed_positions" not in name:
            torch.nn.init.normal_(weight, std=0.21)
    space = tokenizer.convert_tokens_to_ids("Ġ")
    model.generation_config = GenerationConfig(
        suppress_tokens=[3, 5, start],
        begin_suppress_tokens=[space, end],
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
        is_multilingual=True,
        max_initial_timestamp_index=50,
        lang_to_id={f"<|{code}|>": tokenizer.convert_tokens_to_ids(f"<|{code}|>") for code in LANGUAGES},
        task_to_id={name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("transcribe", "translate")},
        prev_sot_token_id=tokenizer.convert_tokens_to_ids("<|startofprev|>"),
        return_timestamps=True,
        max_length=TARGETS,
        decoder_start_token_id=start,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    )
    return model


# -- CTranslate2's layout --------------------------------------------------------------------------------
KINDS = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}


def write_ctranslate2(
    oracle: tuple[Any, Any],
    folder: Path,
    *,
    dtype: str = "float16",
    change: Callable[[dict[str, NDArray[Any]]], None] = lambda variables: None,
) -> Path:
    """Write transformers' model as CTranslate2's converter does, with weights in ``dtype``."""
    hf, tokenizer = oracle
    variables = _variables(hf.state_dict(), hf.config)
    for name in [*variables]:
        if dtype == "int8" and name.endswith("weight") and variables[name].ndim == 2:
            largest = np.abs(variables[name]).max(axis=1)
            scale = variables[f"{name}_scale"] = (127 / np.where(largest == 0, 127, largest)).astype(np.float32)
            variables[name] = np.rint(variables[name] * scale[:, None]).astype(np.int8)
        elif variables[name].dtype == np.float32 and dtype == "float16":
            variables[name] = variables[name].astype(np.float16)
    change(variables)
    out = [struct.pack("<I", 6), _string("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for name, data in sorted(variables.items()):
        out += [_string(name), struct.pack(f"<B{data.ndim}I", data.ndim, *data.shape)]
        out += [struct.pack("<BI", KINDS[str(data.dtype)], data.nbytes), data.tobytes()]
    out += [struct.pack("<I", 1), _string("decoder/projection/weight"), _string("decoder/embeddings/weight")]
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(b"".join(out))
    given = hf.generation_config
    lists = {"suppress_ids": given.suppress_tokens, "suppress_ids_begin": given.begin_suppress_tokens}
    (folder / "config.json").write_text(json.dumps({**lists, "lang_ids": [], "alignment_heads": []}))
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    _without_times(folder / "tokenizer.json")
    return folder


def _without_times(path: Path) -> None:
    """Real files end before the timestamps."""
    record = json.loads(path.read_text(encoding="utf-8"))
    record["added_tokens"] = [token for token in record["added_tokens"] if token["content"] not in TIMES]
    path.write_text(json.dumps(record), encoding="utf-8")


def _string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def _variables(state: Mapping[str, torch.Tensor], config: Any) -> dict[str, NDArray[Any]]:
    def of(name: str) -> NDArray[Any]:
        return state[f"model.{name}"].numpy()

    found: dict[str, NDArray[Any]] = {"decoder/embeddings/weight": of("decoder.embed_tokens.weight")}
    scalars = {"decoder/activation": 3, "decoder/pre_norm": 1, "decoder/alibi": 0, "decoder/scale_embeddings": 0}
    found |= {name: np.array(value, np.int8) for name, value in scalars.items()}
    found |= {f"{side}/num_heads": np.array(HEADS, np.int16) for side in ("encoder", "decoder")}

    def norm(ours: str, theirs: str) -> None:
        found.update({f"{theirs}/gamma": of(f"{ours}.weight"), f"{theirs}/beta": of(f"{ours}.bias")})

    def linear(ours: list[str], theirs: str) -> None:
        weights = [of(f"{name}.weight") for name in ours]
        no_bias = [np.zeros(len(weight), np.float32) for weight in weights]
        biases = [
            state[f"model.{name}.bias"].numpy() if f"model.{name}.bias" in state else zero
            for name, zero in zip(ours, no_bias, strict=True)
        ]
        found.update({f"{theirs}/weight": np.concatenate(weights), f"{theirs}/bias": np.concatenate(biases)})

    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = of(f"{side}.embed_positions.weight")
        norm(f"{side}.layer_norm", f"{side}/layer_norm")
        for number in range(getattr(config, f"{side}_layers")):
            ours, theirs = f"{side}.layers.{number}", f"{side}/layer_{number}"
            linear([f"{ours}.self_attn.{part}_proj" for part in "qkv"], f"{theirs}/self_attention/linear_0")
            linear([f"{ours}.self_attn.out_proj"], f"{theirs}/self_attention/linear_1")
            norm(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
            linear([f"{ours}.fc1"], f"{theirs}/ffn/linear_0")
            linear([f"{ours}.fc2"], f"{theirs}/ffn/linear_1")
            norm(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
            if side == "decoder":
                linear([f"{ours}.encoder_attn.q_proj"], f"{theirs}/attention/linear_0")
                linear([f"{ours}.encoder_attn.{part}_proj" for part in "kv"], f"{theirs}/attention/linear_1")
                linear([f"{ours}.encoder_attn.out_proj"], f"{theirs}/attention/linear_2")
                norm(f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
    for conv in ("conv1", "conv2"):
        linear([f"encoder.{conv}"], f"encoder/{conv}")
    return found
