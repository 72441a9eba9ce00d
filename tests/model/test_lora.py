"""LoRA folders in PEFT's format: read, merged as PEFT merges them, written as PEFT reads them, and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import toy_model, write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toys import CASES, Oracle, save_toy, tokens, toy_hf

import anabranch
from anabranch.adapters.folder import TargetIdentity, read_record, save_adapter
from anabranch.errors import AdapterError, CapabilityError
from anabranch.loading import LoadConfig, check
from anabranch.methods.streams.entry import METHOD
from anabranch.methods.terms import fresh_terms, layers_of, lora_of
from anabranch.methods.tuning import save_tuned
from anabranch.model.config import ModelConfig
from anabranch.model.families import model_config
from anabranch.model.load import load_target
from anabranch.model.lora import Lora, Term
from anabranch.model.peft import CONFIG, WEIGHTS, PeftSettings, read_lora, read_settings, write_lora
from anabranch.model.weights import fingerprint
from small import LLAMA, drawn_lora, logits_after, randomise, small_adapter, with_terms

IDS = tokens(9)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(toy_hf(*CASES["llama"]), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def lora(llama: Path, tmp_path: Path) -> Path:
    """A LoRA folder for the toy, of all its modules."""
    write_lora(tmp_path / "lora", drawn_lora(load_target(str(llama)).config), base="acme/llama")
    return tmp_path / "lora"


def change(lora: Path, **fields: Any) -> None:
    record = json.loads((lora / CONFIG).read_text())
    (lora / CONFIG).write_text(json.dumps({**record, **fields}))


def test_terms_are_added_to_the_weights(llama: Path, lora: Path, tmp_path: Path) -> None:
    merged = load_file(llama / "model.safetensors")
    terms = load_file(lora / WEIGHTS)
    for name in [name for name in terms if ".lora_A." in name]:
        weight = f"{name.removeprefix('base_model.model.').partition('.lora_A')[0]}.weight"
        merged[weight] += (terms[name.replace("lora_A", "lora_B")] @ terms[name]) * 1.5
    other = tmp_path / "merged"
    save_toy(toy_hf(*CASES["llama"]), other)
    save_file(merged, other / "model.safetensors", metadata={"format": "pt"})
    plain, tuned, wanted = load_target(str(llama)), load_target(str(llama), lora=lora), load_target(str(other))
    theirs = dict(wanted.decoder.named_parameters())
    assert all(torch.equal(theirs[name], mine) for name, mine in tuned.decoder.named_parameters())
    # an adapter for the merged model is one for model and LoRA, and none for the model alone
    assert tuned.fingerprint == wanted.fingerprint == fingerprint(tuned.decoder) != plain.fingerprint
    assert (tuned.title, plain.title) == (f"{llama} with the LoRA lora", str(llama))
    quantised = load_target(str(llama), lora=lora, quantize="int8")
    assert quantised.fingerprint == tuned.fingerprint
    assert load_target(str(llama), lora=lora, dtype="bfloat16").fingerprint == tuned.fingerprint


def test_a_written_lora_reads_back(tmp_path: Path) -> None:
    written = drawn_lora(LLAMA)
    terms = dict(written.terms)
    terms[Q] = Term(torch.ones(5, 32), torch.ones(32, 5), 2.0)
    write_lora(tmp_path, Lora(terms), base="acme/llama")
    found = read_lora(tmp_path, LLAMA).terms
    assert found.keys() == terms.keys()
    for name, term in found.items():
        assert torch.equal(term.delta(), terms[name].delta())
    write_lora(tmp_path, Lora({Q: terms[Q]}), base="")
    assert list(read_lora(tmp_path, LLAMA).terms) == [Q]
    assert Lora({Q: terms[Q]}).parameters() == 2 * 5 * 32


def test_ranks_scales_and_selections(tmp_path: Path) -> None:
    lora = drawn_lora(LLAMA, rank=4)
    ends = {"q_proj", "down_proj"}
    write_lora(tmp_path, Lora({n: t for n, t in lora.terms.items() if n.split(".")[-1] in ends}), base="")
    change(tmp_path, target_modules=["q_proj", "down_proj"], lora_alpha=6, use_rslora=True, rank_pattern={}, r=4)
    change(tmp_path, alpha_pattern={"1.self_attn.q_proj": 2, r"layers\.\d+\.mlp\.down_proj": 3})
    found = read_lora(tmp_path, LLAMA).terms
    assert len(found) == 2 * LLAMA.num_layers
    assert (found[Q].scale, found[Q.replace("1", "0")].scale, found[DOWN].scale) == (1.0, 3.0, 1.5)
    change(tmp_path, layers_to_transform=[0, 1])
    with pytest.raises(AdapterError, match=r"has terms of model.layers.2.mlp.down_proj, which \S+ does not select"):
        read_lora(tmp_path, LLAMA)
    kept = Lora({name: lora.terms[name] for name in (Q, Q.replace("1", "0"))})
    write_lora(tmp_path, kept, base="")
    slow = r"(?:model|transformer)(\.\w+)+\.[01]\.self_attn\.q_proj"  # not evaluated: the terms say the same
    for modules in (["q_proj"], r".*\.[01]\.self_attn\.q_proj", "all-linear", slow):
        change(tmp_path, target_modules=modules, layers_to_transform=[0, 1], exclude_modules=[DOWN])
        assert list(read_lora(tmp_path, LLAMA).terms) == sorted(kept.terms)


def test_a_lora_is_loaded_for_decoding(llama: Path, lora: Path) -> None:
    text: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "drafter": "none"}
    with anabranch.load(llama, dtype="float32") as plain, anabranch.load(llama, lora=lora, dtype="float32") as tuned:
        assert "lora='lora'" in repr(tuned)
        assert plain.generate(IDS, **text).token_ids != tuned.generate(IDS, **text).token_ids
        drafted = tuned.generate(IDS, **{**text, "drafter": "prompt_lookup"}).token_ids
        assert drafted == tuned.generate(IDS, **text).token_ids


NAMES = tuple(f"model.layers.{layer}.{end}" for layer in (0, 1, 12) for end in ("self_attn.k_proj", "mlp.up_proj"))
BARE = "layers.1.self_attn.k_proj"  # in a file of the model without its head

# which of NAMES and BARE PEFT 0.21 matches with a key of rank_pattern or alpha_pattern
PATTERNS: dict[str, str] = {
    "k_proj": "x.x.x.x",
    "^k_proj": ".......",
    "k_proj$": "x.x.x.x",
    "^model.*k_proj": "x.x.x..",
    "self_attn.k_proj": "x.x.x.x",
    r"self_attn\.k_proj": "x.x.x.x",
    "attn.k_proj": ".......",
    "_proj": ".......",
    ".*_proj": "xxxxxxx",
    "1.self_attn.k_proj": "..x...x",
    r"layers\.1\.self_attn\.k_proj": "..x...x",
    r"^layers\.1\..*": "......x",
    r"\d+\.mlp\.up_proj": ".x.x.x.",
    "model.layers.1.self_attn.k_proj": "..x....",
    "layers.(0|12).*k_proj": "x...x..",
    "k_proj|up_proj": "xxxxxxx",
    "^k_proj|up_proj": ".x.x.x.",
    r"\bk_proj": "x.x.x.x",
    "K_PROJ": ".......",
    "": ".......",
}


def matched(matches: Callable[[str], bool]) -> str:
    return "".join("x" if matches(name) else "." for name in (*NAMES, BARE))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_in_peft(pattern: str) -> None:
    settings = PeftSettings("", 8, 16, False, {pattern: 3}, {pattern: 5}, (), (), (), ())
    assert matched(lambda name: settings.rank_of(name) == 3) == PATTERNS[pattern]
    assert matched(lambda name: settings.scale_of(name) in (5 / 3, 5 / 8)) == PATTERNS[pattern]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_table_of_patterns_is_pefts(pattern: str) -> None:
    pytest.importorskip("peft")
    from peft.utils.other import get_pattern_key

    assert matched(lambda name: {pattern: 3}.get(get_pattern_key([pattern], name), 8) == 3) == PATTERNS[pattern]


# target_modules and what limits them, and which of NAMES and BARE PEFT 0.21 selects
SELECTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"target_modules": ["k_proj"]}, "x.x.x.x"),
    ({"target_modules": ["attn.k_proj"]}, "......."),
    ({"target_modules": ["self_attn.k_proj", NAMES[1]]}, "xxx.x.x"),
    ({"target_modules": r".*\.k_proj"}, "x.x.x.x"),
    ({"target_modules": "k_proj"}, "......."),
    ({"target_modules": r"model\.layers\.\d\.(self_attn|mlp)\..*"}, "xxxx..."),
    ({"target_modules": ["k_proj", "up_proj"], "exclude_modules": ["mlp.up_proj", NAMES[0]]}, "..x.x.x"),
    ({"target_modules": ["k_proj", "up_proj"], "exclude_modules": r".*\.1\..*"}, "xx..xx."),
    ({"target_modules": ["k_proj"], "layers_to_transform": 1}, "..x...."),
    ({"target_modules": ["k_proj", NAMES[1]], "layers_to_transform": [1, 12]}, ".xx.x.."),
    ({"target_modules": ["k_proj"], "layers_to_transform": []}, "x.x.x.x"),
    ({"target_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, "..x...x"),
    ({"target_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "model.layers"]}, "..x...."),
    ({"target_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]}, "......."),
)


@pytest.mark.parametrize(("fields", "expected"), SELECTIONS)
def test_modules_are_selected_as_in_peft(fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    record = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **fields}
    (tmp_path / CONFIG).write_text(json.dumps(record))
    settings = read_settings(tmp_path)
    assert matched(lambda name: bool(settings.selects(name))) == expected


@pytest.mark.parametrize(("fields", "expected"), SELECTIONS)
def test_the_table_of_selections_is_pefts(fields: dict[str, Any], expected: str) -> None:
    pytest.importorskip("peft")
    from types import SimpleNamespace

    from peft.tuners.tuners_utils import check_target_module_exists

    whole = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None, "target_parameters": None}
    config = SimpleNamespace(**whole | fields)
    assert matched(lambda name: bool(check_target_module_exists(config, name))) == expected


def test_patterns_count_for_the_names_in_the_file(tmp_path: Path) -> None:
    write_lora(tmp_path, Lora({Q: drawn_lora(LLAMA, rank=4).terms[Q]}), base="")
    tensors_of(tmp_path, lambda t: [t.update({k.replace("model.layers", "layers", 1): t.pop(k)}) for k in list(t)])
    change(tmp_path, target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers", lora_alpha=8)
    change(tmp_path, alpha_pattern={r"^layers.*": 4})
    assert read_lora(tmp_path, LLAMA).terms[Q].scale == 1.0


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "there is no LoRA folder"),
    "no config": (lambda f: (f / CONFIG).unlink(), "has no adapter_config.json; it is no LoRA"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
    "pickled": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "only pickled weights"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "is not JSON"),
    "not PEFT's": (lambda f: (f / CONFIG).write_text("{}"), "is not PEFT's: give a folder that PEFT saved"),
    "ours": (lambda f: change(f, format="anabranch adapter"), ""),
    "IA3": (lambda f: change(f, peft_type="IA3"), "adapter of the type 'IA3', and only LoRA is read"),
    "biases": (lambda f: change(f, bias="all"), "trains biases"),
    "DoRA": (lambda f: change(f, use_dora=True), "sets use_dora to True, which is not supported"),
    "PiSSA": (lambda f: change(f, init_lora_weights="pissa"), "changes the base model's weights"),
    "saved modules": (lambda f: change(f, modules_to_save=["lm_head"]), r"sets modules_to_save to \['lm_head'\]"),
    "a later version's": (lambda f: change(f, use_more=1), "sets use_more to 1, which is not supported"),
    "no rank": (lambda f: change(f, r=0), "r in .* must be a whole number of at least 1, got 0"),
    "no alpha": (lambda f: change(f, lora_alpha="8"), "lora_alpha in .* must be a number, got '8'"),
    "ranks": (lambda f: change(f, rank_pattern={"q_proj": 1.5}), "rank_pattern in .* must be numbers by module name"),
    "a pattern": (lambda f: change(f, alpha_pattern={"(": 1}), "no regular expression"),
    "a slow pattern": (lambda f: change(f, rank_pattern={"((\\w|\\.)+)+!": 1}), "may take forever to match"),
    "repeats": (lambda f: change(f, rank_pattern={".*.*.*.*!": 1}), "with more than 3 repeats"),
    "a pattern of modules": (lambda f: change(f, target_modules="(q_proj"), "no regular expression"),
    "a pattern of stacks": (lambda f: change(f, layers_pattern=["("]), "layers_pattern in .* no regular expression"),
    "other modules": (lambda f: change(f, target_modules=r".*\.q_proj"), "has terms of .*, which .* does not select"),
    "a flag": (lambda f: change(f, use_rslora="yes"), "use_rslora in .* must be true or false, got 'yes'"),
    "term biases": (lambda f: change(f, lora_bias=True), "sets lora_bias to True"),
    "trained tokens": (lambda f: change(f, trainable_token_indices=[3]), r"sets trainable_token_indices to \[3\]"),
    "replicated layers": (lambda f: change(f, layer_replication=[[0, 2], [1, 3]]), "sets layer_replication to"),
    "parameters": (lambda f: change(f, target_parameters=["mlp.up_proj.weight"]), "sets target_parameters to"),
    "modules": (lambda f: change(f, target_modules=[3]), "target_modules in .* must be module names"),
    "no modules": (lambda f: change(f, target_modules=None), "names no target_modules"),
    "layers": (lambda f: change(f, layers_to_transform="all"), "layers_to_transform in .* must be layer numbers"),
    "another rank": (lambda f: change(f, r=4), r"lora_A of .* with the shape \(3, 64\), .* rank 4 require \(4, 64\)"),
    "truncated": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "is truncated"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "is truncated"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_folders(case: str, llama: Path, lora: Path) -> None:
    damage, sentence = BAD[case]
    damage(lora)
    if not sentence:  # still a LoRA in spite of an additional field
        sentence = "sets format to 'anabranch adapter'"
    with pytest.raises(AdapterError, match=sentence) as caught:
        load_target(str(llama), lora=lora)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")


def test_invalid_options_are_refused_before_loading(lora: Path, toys: Any) -> None:
    check(LoadConfig(lora=lora))
    change(lora, use_dora=True)
    with pytest.raises(AdapterError, match="use_dora"):
        check(LoadConfig(lora=lora))
    with pytest.raises(AdapterError, match="is not PEFT's: it is an adapter of anabranch: give it as the adapter"):
        anabranch.load(toys.model, lora=toys.adapter)


def tensors_of(lora: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    found = load_file(lora / WEIGHTS)
    edit(found)
    save_file(found, lora / WEIGHTS)


def test_terms_that_do_not_fit(llama: Path, lora: Path) -> None:
    key = f"base_model.model.{Q}.lora_B.weight"

    def refused(edit: Callable[[dict[str, Tensor]], Any], sentence: str) -> None:
        kept = (lora / WEIGHTS).read_bytes()
        tensors_of(lora, edit)
        with pytest.raises(AdapterError, match=sentence):
            load_target(str(llama), lora=lora)
        (lora / WEIGHTS).write_bytes(kept)

    refused(lambda t: t.pop(key), f"lacks the terms of {Q}.*incomplete, or it was trained for another model")
    refused(lambda t: t.update({key: t[key][:5].clone()}), r"shape \(5, 3\).* \('acme/llama'\)")
    refused(lambda t: t.update({key: t[key] * float("nan")}), "not finite numbers")
    refused(lambda t: t.update({key: t[key].long()}), "as int64; use weights in float32")
    head = "base_model.model.lm_head.lora_A.weight"
    refused(lambda t: t.update({head: torch.ones(3, 64)}), f"has {head}, and of a llama model only LoRA of q_proj")
    refused(lambda t: t.update({"x": torch.ones(1)}), "has x, and of a llama model only")
    change(lora, target_modules=["c_attn"])
    refused(dict.clear, "has no term for any linear layer of a llama model; .*trained for")
    wider = model_config({**json.loads((llama / "config.json").read_text()), "intermediate_size": 128})
    change(lora, target_modules=list(ALL))
    with pytest.raises(AdapterError, match=r"lora_B of model.layers.0.mlp.gate_proj with the shape \(96, 3\)"):
        read_lora(lora, wider)


def test_an_adapter_belongs_to_its_lora(toys: Any, tmp_path: Path) -> None:
    write_lora(tmp_path, drawn_lora(load_target(str(toys.model)).config), base="")
    with pytest.raises(AdapterError, match=r"was trained for toy .* but the target is .* with the LoRA"):
        anabranch.load(toys.model, lora=tmp_path, adapter=toys.adapter)
    target = load_target(str(toys.model), lora=tmp_path)
    module = small_adapter(target.decoder)
    mine = tmp_path / "adapter"
    save_adapter(mine, module, method=METHOD, target=TargetIdentity.of(target), training={}, measured={})
    assert read_record(mine)["target"]["lora"] == tmp_path.name
    card = (mine / "README.md").read_text()
    assert f'anabranch.load("model", lora="{tmp_path.name}", drafter="streams"' in card
    with anabranch.load(toys.model, lora=tmp_path, adapter=mine) as model:
        assert model.generate("the", max_new_tokens=4).token_ids
    with pytest.raises(AdapterError, match=f"was trained for model with the LoRA '{tmp_path.name}'"):
        anabranch.load(toys.model, adapter=mine)


def test_peers_read_the_model_from_its_files(llama: Path, lora: Path) -> None:
    from anabranch.bench.peers import launch

    target = load_target(str(llama), lora=lora)
    spec = type("Spec", (), {"name": "some"})()
    with pytest.raises(CapabilityError, match="without the LoRA"):
        launch._weights(spec, {}, target, Path())


MODULES: dict[str, list[str]] = {
    "llama": list(ALL),
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h"],
    "opt": ["q_proj", "v_proj", "out_proj", "fc1"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "up_proj"],
}


def peft_model(case: str, **settings: Any) -> Any:
    """A toy with random terms, as peft trains it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    fields = {"r": 3, "lora_alpha": 5, "target_modules": MODULES[case], "init_lora_weights": False, **settings}
    return peft.get_peft_model(toy_hf(*CASES[case]), peft.LoraConfig(task_type="CAUSAL_LM", **fields))


def logits(target: Any) -> Tensor:
    return logits_after(target.decoder, IDS)


def tuning(config: ModelConfig) -> nn.ModuleList:
    """Random terms of all layers, as methods train them."""
    layers = layers_of(config, fresh_terms(config, 3))
    randomise(layers, 4, scale=0.1)
    return layers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
@pytest.mark.parametrize("case", sorted(MODULES))
def test_merged_as_peft_merges(case: str, tmp_path: Path) -> None:
    ends = MODULES[case]
    tuned = peft_model(
        case, use_rslora=True, rank_pattern={ends[0]: 2}, alpha_pattern={ends[-1]: 7}, layers_to_transform=[0, 2]
    )
    tuned.save_pretrained(tmp_path / "lora")
    model = save_toy(toy_hf(*CASES[case]), tmp_path / "model")
    mine = load_target(str(model), dtype="float32", lora=tmp_path / "lora")
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(logits(mine), Oracle(merged).logits(IDS), rtol=0, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    theirs = load_target(str(save_toy(merged, tmp_path / "merged")), dtype="float32")
    weights = dict(theirs.decoder.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in mine.decoder.named_parameters())  # to the bit
    assert mine.fingerprint == theirs.fingerprint


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
@pytest.mark.parametrize("case", sorted(MODULES))
def test_peft_reads_what_is_written(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = toy_hf(*CASES[case])
    model = save_toy(base, tmp_path / "model")
    lora = drawn_lora(load_target(str(model)).config)
    lora = Lora({n: Term(t.down_RI[:2], t.up_OR[:, :2], 1.5) if "1" in n else t for n, t in lora.terms.items()})
    write_lora(tmp_path / "lora", lora, base="acme/toy")
    mine = load_target(str(model), dtype="float32", lora=tmp_path / "lora")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "lora").merge_and_unload()
    torch.testing.assert_close(logits(mine), Oracle(theirs).logits(IDS), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
def test_peft_reads_terms_that_methods_trained(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = toy_hf(*CASES["llama"])
    target = load_target(str(save_toy(base, tmp_path / "model")), dtype="float32")
    layers = tuning(target.config)
    write_lora(tmp_path / "lora", lora_of(target.config, layers), base="acme/toy")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "lora").merge_and_unload()
    tuned = save_tuned(tmp_path / "tuned", layers, target)
    torch.testing.assert_close(logits(tuned), Oracle(theirs).logits(IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tuned_target_is_its_files_with_the_lora(dtype: str, tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "toy.gguf", "llama", toy_model("llama")))  # in float32, which bfloat16 rounds
    target = load_target(path, dtype=dtype)
    layers = tuning(target.config)
    tuned = save_tuned(tmp_path / "tuned", layers, target)
    write_lora(tmp_path / "lora", lora_of(target.config, layers), base="")
    again = load_target(path, dtype=dtype, lora=tmp_path / "lora")
    assert again.fingerprint == tuned.fingerprint
    weights = dict(again.decoder.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in tuned.decoder.named_parameters())


def test_a_target_with_a_lora_is_tuned(llama: Path, lora: Path, tmp_path: Path) -> None:
    target = load_target(str(llama), dtype="float32", lora=lora)
    layers = tuning(target.config)
    tuned = save_tuned(tmp_path / "tuned", layers, target)
    wanted = logits_after(with_terms(target.decoder, layers), IDS)
    torch.testing.assert_close(logits(tuned), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["gpt_neox", "phi3"])
def test_terms_of_fused_modules_are_trained_where_they_belong(case: str, tmp_path: Path) -> None:
    from anabranch.learning.examples import Batch, Example
    from anabranch.learning.target import run_frozen
    from anabranch.methods.tuning import tuned_pass
    from anabranch.train.lora import LoraLayers

    model = save_toy(toy_hf(*CASES[case]), tmp_path / "model")
    target = load_target(str(model), dtype="float32")
    lora = drawn_lora(target.config)
    write_lora(tmp_path / "lora", lora, base="")
    module = LoraLayers(target.config, lora)
    assert all(torch.equal(term.up_OR, lora.terms[name].up_OR) for name, term in module.lora().terms.items())
    batch = Batch.of([Example(tuple(IDS[:2]), tuple(IDS[2:]))])
    found = tuned_pass(target.decoder, module.layers, batch.tokens_BT).hidden_BTD
    wanted = run_frozen(load_target(str(model), dtype="float32", lora=tmp_path / "lora").decoder, batch).hidden_BTD
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
