"""Toy encoder-decoder models of every family, with transformers' as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from toys import VOCABULARY, save_toy

from anabranch.model.decoder import Decoder
from anabranch.model.encoder import Source
from anabranch.model.families import model_config
from anabranch.model.weights import fill_decoder

CHANNELS, FRAMES = 20, 60
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "initializer_factor": 1.0,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "init_std": 0.2,
}  # fmt: skip
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

# name -> (Hugging Face model_type, its config)
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5),
    "t5-gated": ("t5", {**_T5, **_GATED}),  # v1.1 and Flan
    "mt5": ("mt5", _T5),
    "bart": ("bart", _BART),
    "marian": ("marian", {**_BART, "scale_embedding": True, "activation_function": "swish"}),
    "marian-apart": (
        "marian",
        {**_BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCABULARY - 20},
    ),
    "whisper": (
        "whisper",
        {**_BART, "max_source_positions": FRAMES // 2, "max_target_positions": 64, "num_mel_bins": CHANNELS},
    ),
}


class Pair:
    """A toy of ours, and transformers' model with the same weights; ``fields`` replace those of its config."""

    def __init__(self, name: str, *, seed: int = 0, **fields: Any) -> None:
        self.family, usual = PAIRS[name]
        self.fields = {**usual, **fields}
        self.model = pair_hf(self.family, self.fields, seed=seed)
        described, tensors = self.model.config.to_dict(), self.model.state_dict()
        self.decoder: Decoder
        config = model_config(described)
        self.decoder, _ = fill_decoder(config, tensors, dtype=torch.float32, device=torch.device("cpu"), share=True)
        self.start: int = self.fields["decoder_start_token_id"]
        self.words = config.vocab_size

    def source(self, length: int, *, seed: int) -> Source:
        return self.source_of(self.family, length, seed=seed)

    @staticmethod
    def source_of(family: str, length: int, *, seed: int) -> Source:
        """A source of this many tokens, or features whatever their length."""
        noise = torch.Generator().manual_seed(seed)
        if family == "whisper":
            return Source(features=torch.randn(CHANNELS, FRAMES, generator=noise))
        return Source(torch.randint(3, VOCABULARY, (length,), generator=noise).tolist())

    def text(self, length: int, *, seed: int) -> list[int]:
        """The beginning of a text of the decoder."""
        noise = torch.Generator().manual_seed(1000 + seed)
        return [self.start, *torch.randint(3, self.words, (length - 1,), generator=noise).tolist()]

    @torch.inference_mode()
    def logits(self, source: Source, text: list[int]) -> Tensor:
        """Transformers' logits after each token of a text [N, V]."""
        ids = torch.tensor([text])
        if source.features is not None:
            found: Tensor = self.model(input_features=source.features[None], decoder_input_ids=ids).logits[0]
        else:
            found = self.model(input_ids=torch.tensor([[*source.tokens]]), decoder_input_ids=ids).logits[0]
        return found


def pair_hf(family: str, fields: dict[str, Any], *, seed: int = 0) -> Any:
    """A transformers model with random weights, biases and norms included."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    described = AutoConfig.for_model(family, **fields)
    whisper = family == "whisper"
    model = WhisperForConditionalGeneration(described) if whisper else AutoModelForSeq2SeqLM.from_config(described)
    model = model.float().eval()
    computed = ("embed_positions",) if family == "marian" else ()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not any(part in name for part in computed):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if getattr(model, "final_logits_bias", None) is not None:
            model.final_logits_bias.normal_()
    return model


def save_pair(name: str, folder: Path, *, seed: int = 0, **fields: Any) -> Path:
    """Write a toy and its tokenizer to ``folder``; ``fields`` replace those of its config."""
    family, usual = PAIRS[name]
    return save_toy(pair_hf(family, {**usual, **fields}, seed=seed), folder)
