"""Each field of config.json changed alone: our logits are transformers', or the load is refused by name.

A model is saved once per family; then only its config.json changes, so that weights and config may disagree as they do
in files that were edited by hand. The usual run has one value of each of Llama's fields, the thorough one several of
every family's, and a share of nulls and of other families' fields.
"""

from __future__ import annotations

import json
import logging
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import PAIRS, Pair, pair_hf
from torch import Tensor
from toys import CASES, tokens, toy_hf

from anabranch.errors import ModelError, ModelWarning
from anabranch.model.config import ModelConfig
from anabranch.model.encoder import Source
from anabranch.model.families import FAMILIES, model_config
from anabranch.model.fields import FIELDS
from anabranch.model.inputs import Inputs
from anabranch.model.stored import load_safetensors_dir
from anabranch.model.weights import fill_decoder
from anabranch.tree import DraftTree
from small import logits_of, new_cache

IDS = tokens(13)
PROMPT = 9  # more than the window of the toys, so that a window that slides over the cache alone shows
BASES = {family: family for family in FAMILIES} | {
    "mistral": "mistral-sliding",
    "ministral": "mistral-sliding",
    "qwen2": "qwen2-sliding",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen3_5",
}
# the last of a name wins, so families with several toys have the plain one again
ENCODED = dict(PAIRS.values()) | {name: PAIRS[name][1] for name in ("t5", "marian")}
COMPUTED: dict[tuple[Path, str], tuple[Tensor, Tensor] | ModelError] = {}
FACTORS = [1.0 + i / 8 for i in range(8)]
ROPES: list[Any] = [
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "factor": 2.0},
    {"type": "su", "short_factor": FACTORS, "long_factor": FACTORS},
    {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "factor": 9.0, "mrope_section": [2, 3, 3]},
    {"full_attention": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_theta": None},
    {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
    {},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
    {"rope_type": "default", "rope_theta": 300.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4},
    {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": None},
]
ACTIVATIONS = ["gelu", "relu", "silu", "swish", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh"]
ACTIVATIONS += ["gelu_accurate", "gelu_python_tanh", "quick_gelu", "relu2", "tanh"]
FULL, SLIDING = "full_attention", "sliding_attention"
# values of fields, the one for the usual run first; others are derived from the default
VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ROPES),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ACTIVATIONS),
    "sliding_window": [3, 100],
    "max_window_layers": [1, 0, 9],
    "head_dim": [8, 16, 32],
    "num_key_value_heads": [1, 2, 4],
    "num_attention_heads": [2, 8],
    "num_hidden_layers": [2, 5],
    **{key: [300.0, 10_000] for key in ("rope_theta", "rotary_emb_base")},
    **{key: [0.75, 1.0, 0.25] for key in ("partial_rotary_factor", "rotary_pct")},
    "original_max_position_embeddings": [32, 4096],
    **{key: [0.3] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")},
    "query_pre_attn_scalar": [77],
    **{key: [1.5, 0.0] for key in ("attn_logit_softcapping", "final_logit_softcapping")},
    "swiglu_alpha": [1.2, 3.0],
    "swiglu_limit": [0.5, 20.0],
    "mlp_only_layers": [[1, 2], [], [0, 1, 2], [7]],
    "is_causal": [False],
    "per_layer_config": [{"1": {"head_dim": 8}}],
    "attention_chunk_size": [4],
    "kv_sharing_modes": [["reuse"] * 4],
    **{key: [{"model_type": "llama"}] for key in ("text_config", "decoder", "generator")},
    "torch_dtype": ["bfloat16"],
    "dtype": ["bfloat16"],
    "architectures": [["LlamaForSequenceClassification"]],
    **{key: [0.3, 2, -1.0, 0.0] for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier")},
    "logits_scaling": [0.3, 8, 0.0],
    "logit_scale": [0.3],
    "no_rope_layers": [[0, 1, 1], [1, 1, 1, 0], [0], [True, False, True], [0, 2, 1]],
    "no_rope_layer_interval": [3, 1, 0],
    "sliding_window_pattern": [3, 1, 0],
    "rope_local_base_freq": [300.0],
    "num_local_experts": [4],
    "layers_block_type": [["attention"] * 3],
    "position_embedding_type": ["rope", "nope", 1],
    "shared_intermediate_size": [48],
    "pretraining_tp": [2],
    "problem_type": ["regression"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "summary_type": ["mean"],
    "summary_activation": ["tanh"],
    "transformers_version": ["4.1.0"],
    "_attn_implementation": ["eager"],
    "use_bidirectional_attention": [True],
}
# fields of models that are not supported, which a file may have left
FOREIGN = ["attention_multiplier", "logit_scale", "clip_qkv", "embedding_multiplier", "num_local_experts", "alibi"]


def toy(family: str) -> dict[str, Any]:
    """The config of a family's toy."""
    return ENCODED[family] if family in ENCODED else CASES[BASES[family]][1]


def values(family: str, field: str) -> list[Any]:
    """Values of a field that differ from the default, the most telling first."""
    if field == "layer_types" and family == "qwen3_5_text":
        return [[FULL, *["linear_attention"] * 2], [SLIDING] * 3, [FULL]]
    if field == "layer_types":
        count = toy(family).get("num_hidden_layers", 3)
        kinds = [[SLIDING, FULL] * count, [FULL] * count, [SLIDING] * count, ["attention", SLIDING] * count]
        return [*(each[:count] for each in kinds), [FULL], ["conv"] * count]
    if field in VALUES:
        return VALUES[field]
    default = FIELDS[family].honoured.get(field)
    if field in FIELDS[family].refused:
        default = FIELDS[family].refused[field].neutral[-1]
    if isinstance(default, bool):
        return [not default]
    base = toy(family).get(field)
    if isinstance(base, int) and not isinstance(base, bool):
        return [base * 2, max(1, base // 2), base + 1]
    return [1, True, 0.5]


@cache
def saved(family: str, folder: Path) -> Path:
    model = pair_hf(family, toy(family)) if family in ENCODED else toy_hf(*CASES[BASES[family]])
    model.save_pretrained(folder / family)
    if family == "ministral":  # the same weights
        path = folder / family / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "layer_types": [SLIDING, FULL, SLIDING]}))
    return folder / family


def theirs(folder: Path) -> tuple[Tensor, Tensor] | str:
    """transformers' logits of a text in one forward pass and in several with a cache; or why it cannot compute them."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    source = source_of(folder)
    kind: Any = AutoModelForCausalLM
    if source is not None:
        kind = AutoModelForSeq2SeqLM if source.features is None else AutoModelForSpeechSeq2Seq
    try:
        model, report = kind.from_pretrained(
            folder, dtype="float32", attn_implementation="eager", output_loading_info=True
        )
        if report["missing_keys"]:
            return "weights are missing"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the cache's argument has a new name from 5.40 on
            if source is not None:
                fed = {"input_features": source.features[None]} if source.features is not None else {}
                fed = fed or {"input_ids": torch.tensor([[*source.tokens]])}
                whole = model.eval()(**fed, decoder_input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
                return whole, whole
            whole = model.eval()(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
            cached, past = [], None
            for piece in pieces():
                out = model(input_ids=torch.tensor([piece]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                cached.append(out.logits[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return whole, torch.cat(cached)


def source_of(folder: Path) -> Source | None:
    """What the encoder of a family reads; None for a decoder alone."""
    return SOURCES.get(folder.name)


def pieces() -> list[list[int]]:
    return [IDS[:PROMPT], *([token] for token in IDS[PROMPT:])]


def ours(folder: Path) -> tuple[Tensor, Tensor] | ModelError:
    """The same of our decoder; once a config, since many fields change nothing in it."""
    try:
        config = model_config(json.loads((folder / "config.json").read_text()))
    except ModelError as error:
        return error
    key = folder, repr(config)
    if key not in COMPUTED:
        COMPUTED[key] = computed(folder, config)
    return COMPUTED[key]


def computed(folder: Path, config: ModelConfig) -> tuple[Tensor, Tensor] | ModelError:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ModelWarning)
            stored = load_safetensors_dir(folder)
            decoder, _ = fill_decoder(config, stored, dtype=torch.float32, device=torch.device("cpu"))
        source = source_of(folder)
    except ModelError as error:
        return error
    found = []
    for parts in ([IDS], pieces()):
        cache = new_cache(decoder, capacity=32) if source is None else decoder.new_cache(1, 32)
        if source is not None:
            cache.add_row(1, decoder.encode(source))
        logits = []
        for start, piece in enumerate(parts):
            feed = Inputs.of_prompt(piece) if start == 0 else Inputs.of_trees([DraftTree.root(piece[0])])
            logits.append(logits_of(decoder(feed, cache))[0])
            cache.commit([list(range(len(piece)))])
        found.append(torch.cat(logits))
    return found[0], found[1]


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether logits differ by float32's rounding alone, which grows with the largest logit (31 in the toy of mT5)."""
    return torch.allclose(a, b, rtol=0, atol=1e-4 + 1e-5 * float(b.abs().max()))


def verdict(folder: Path, described: dict[str, Any], field: str, value: Any) -> str:
    """``equal``, ``refused: why``, or what is wrong, in capitals."""
    (folder / "config.json").write_text(json.dumps({**described, field: value}))
    found = ours(folder)
    if isinstance(found, ModelError):
        names = (field, *MEANS.get(field, ()), "the weights lack", "has the shape")
        named = any(name in str(found) for name in names)
        return f"refused: {found}" if named else f"REFUSED WITHOUT ITS NAME: {found}"
    wanted = theirs(folder)
    if isinstance(wanted, str):
        return f"NOT REFUSED, though transformers fails ({wanted[:120]})"
    if all(equal(a, b) for a, b in zip(found, wanted, strict=True)):
        return "equal"
    far = [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
    return f"DIFFERENT by {far[0]:.2g} in one pass, {far[1]:.2g} with a cache"


SOURCES = {family: Pair.source_of(family, 9, seed=7) for family in ENCODED}
# what a message may name instead of a field
MEANS: dict[str, tuple[str, ...]] = {
    "use_sliding_window": ("layer_types",),
    "num_hidden_layers": ("layer_types", "no_rope_layers", "layers but the weights have"),
    **dict.fromkeys(("n_layer", "num_layers"), ("layers but the weights have",)),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), ("layers but the weights have",)),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), ("attention heads",)),
    "n_embd": ("hidden_size",),
    "n_head": ("attention heads",),
    "num_attention_heads": ("heads cannot share",),
    "num_key_value_heads": ("heads cannot share",),
    "hidden_size": ("word_embed_proj_dim", "d_model"),
    "rope_parameters": ("rotary variant",),
    "rope_scaling": ("rotary variant",),
}
# what we load although transformers fails: a missing width of heads is hidden_size by heads, as in its other families,
# and Phi-3's first name of longrope needs no length beside the config's own
# null stands for a missing length there, too
LENIENT = {
    *(("ministral", "head_dim"), ("phi3", "rope_parameters"), ("phi3", "rope_scaling")),
    *(("ministral3", "original_max_position_embeddings"), ("gpt_oss", "original_max_position_embeddings")),
    *(("mixtral", "rope_parameters"), ("mixtral", "rope_scaling")),  # a missing base
    *(("marian", "decoder_vocab_size"), ("whisper", "num_key_value_heads")),  # of no effect
}


def wrong(family: str, field: str, said: str) -> bool:
    """True for a verdict against the rule. Types of ignored fields are left to transformers."""
    table = FIELDS[family]
    if said.startswith("NOT REFUSED"):
        return field in (*table.honoured, *table.aliases, *table.refused) and (family, field) not in LENIENT
    return said[:2].isupper()


def sweep(family: str, folder: Path, pairs: Iterator[tuple[str, Any]]) -> str:
    """A table of what does not hold; empty if all is well."""
    path = saved(family, folder)
    described = json.loads((path / "config.json").read_text())
    try:
        lines = [(field, value, verdict(path, described, field, value)) for field, value in pairs]
    finally:
        (path / "config.json").write_text(json.dumps(described))
    assert any(said == "equal" for *_, said in lines)
    found = [f"{family:10} {field} = {value!r}: {said}" for field, value, said in lines if wrong(family, field, said)]
    return "\n".join(["", *found]) if found else ""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep transformers from reporting every file and every tensor that does not fit."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("family", ["llama"])
def test_each_field_alone(family: str, folder: Path) -> None:
    fields = (*FIELDS[family].honoured, *FIELDS[family].refused)
    assert sweep(family, folder, ((field, values(family, field)[0]) for field in fields)) == ""


def _share(parts: int, *what: object) -> bool:
    """True for one in ``parts`` of all, the same ones in every run."""
    return zlib.crc32(repr(what).encode()) % parts == 0


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_alone_with_several_values(family: str, folder: Path) -> None:
    table = FIELDS[family]
    others = {name for each in FIELDS.values() for name in (*each.honoured, *each.aliases, *each.refused)}
    own = {*table.honoured, *table.aliases, *table.refused, *table.ignored}
    pairs: list[tuple[str, Any]] = []
    for field in sorted(own):
        first, *more = values(family, field)
        # null and every other value in a third of the families
        pairs += [(field, value) for value in (first, *(v for v in (*more, None) if _share(3, family, field, v)))]
    # each field of other families in a twelfth of the families
    foreign = [field for field in sorted({*others, *FOREIGN} - own) if _share(12, family, field)]
    pairs += [(field, values(family, field)[0]) for field in foreign]
    assert sweep(family, folder, iter(pairs)) == ""
