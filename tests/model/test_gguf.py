from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import ARCHITECTURES, TOKENS, finish, toy_model, write_gguf

from anabranch.errors import FileError, ModelError
from anabranch.model.fetch import write_folder
from anabranch.model.gguf import _read, read_gguf, unpermute_rotary
from anabranch.model.gguf_tokenizer import build_tokenizer, end_tokens
from anabranch.model.load import load_target


def llama(folder: Path, **options: Any) -> Path:
    """A file of a toy of the family llama."""
    return write_gguf(folder / "toy.gguf", "llama", toy_model("llama"), **options)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_family_survives_the_way_through_gguf(tmp_path: Path, family: str) -> None:
    """Names, layout and config at once: the model rebuilt from the file computes the same logits, bit for bit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    original = toy_model(family)
    contents = read_gguf(write_gguf(tmp_path / "toy.gguf", family, original), dtype=torch.float32)

    expected = original.state_dict()
    if original.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(contents.tensors) == set(expected)
    rebuilt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**contents.config)).eval()
    # Gemma's norms went through `+ 1 - 1` in float32, the others are untouched
    tolerance = 1e-6 if family in ("gemma", "gemma2", "gemma3") else 0.0
    for name, values in expected.items():
        torch.testing.assert_close(contents.tensors[name], values, rtol=0, atol=tolerance)
    rebuilt.load_state_dict(dict(contents.tensors), strict=False)
    rebuilt.tie_weights()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(ids).logits, original(ids).logits, rtol=0, atol=1e-4 * bool(tolerance))


def test_rotary_rows_as_drawn() -> None:
    rows = np.array([[0], [2], [1], [3]])
    assert unpermute_rotary(rows, 1)[:, 0].tolist() == [0, 1, 2, 3]


def test_quantised_blocks_are_dequantised_then_rounded_once(tmp_path: Path) -> None:
    """The rows of q are quantised one by one, so undoing their order is exact on quantised rows too."""
    contents = read_gguf(llama(tmp_path, quantize=True))
    kind, stored = gguf.GGMLQuantizationType.Q8_0, toy_model("llama").state_dict()
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(stored[name].numpy(), kind), kind)
        assert torch.equal(contents.tensors[name], torch.from_numpy(expected).bfloat16())


def test_a_folder_of_a_file_is_the_same_model(tmp_path: Path) -> None:
    path, done = llama(tmp_path, quantize=True), []
    contents = read_gguf(path, dtype=torch.bfloat16)
    write_folder(contents, tmp_path / "folder", lambda tensors, total: done.append((tensors, total)))
    folder = load_target(str(tmp_path / "folder"), device="cpu")
    assert folder.fingerprint == load_target(str(path), quantize="none", device="cpu").fingerprint
    assert folder.tokenizer("hi 12").input_ids == contents.tokenizer("hi 12").input_ids
    assert folder.config.eos_token_ids
    assert done[-1] == (len(contents.tensors), len(contents.tensors))


def test_llama3_frequencies_are_recovered_from_their_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = toy_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    contents = read_gguf(write_gguf(tmp_path / "toy.gguf", "llama", model))
    assert contents.config["rope_parameters"] == rope


def test_smollm_digits_are_split_before_anything_else(tmp_path: Path) -> None:
    path = llama(tmp_path)
    tokenizer = read_gguf(path).tokenizer
    assert tokenizer.tokenize("12345") == list("12345")
    # GPT-2's split alone gives "\n", "\n", "1"
    assert tokenizer.tokenize("a\n\n1.") == ["a", "ĊĊ", "1", "."]
    text = "  hi\n\n\tx = 12345; café 東京 🙂 don't"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = read_gguf(llama(tmp_path)).tokenizer
    hi = TOKENS.index("hi")
    assert tokenizer("<|im_start|>hi<|im_end|><|endoftext|>").input_ids == [1, hi, 2, 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.decode([1, hi, 2], skip_special_tokens=True) == "hi"
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_tokenizer_is_the_same_after_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = read_gguf(llama(tmp_path)).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "<|im_start|>a\n\n12 hi"
    assert again(text).input_ids == tokenizer(text).input_ids


def test_llama3_split_keeps_three_digits_and_begins_with_bos(tmp_path: Path) -> None:
    tokenizer = read_gguf(llama(tmp_path, pre="llama-bpe")).tokenizer
    assert tokenizer("hi").input_ids == [1, TOKENS.index("hi")]
    assert [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12345")] == ["123", "45"]


PIECES = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]


def sentencepiece(path: Path, architecture: str, **keys: Any) -> Any:
    """The tokenizer of a toy file with a SentencePiece vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *PIECES])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 256))
    writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(PIECES) - 256)])
    for key, value in {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys}.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    for count in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"{architecture}.{count}", 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    finish(writer)
    return build_tokenizer(path, _read(path)[0])


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma", "gemma3"])
@pytest.mark.parametrize("space", [True, False])
def test_the_file_says_whether_a_space_is_added(tmp_path: Path, architecture: str, space: bool) -> None:
    tokenizer = sentencepiece(tmp_path / "toy.gguf", architecture, add_space_prefix=space)
    assert tokenizer.tokenize("ab a") == (["▁ab", "▁a"] if space else ["ab", "▁a"])
    for text in ("ab a", "aé 東"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_file_says_which_tokens_are_added(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    for bos, eos in product((True, False), repeat=2):
        expected = [1] * bos + [5] + [2] * eos
        keys = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        byte_level = read_gguf(llama(tmp_path, keys=keys)).tokenizer
        assert byte_level(TOKENS[5]).input_ids == expected
        pieces = sentencepiece(path, "llama", add_bos_token=bos, add_eos_token=eos)
        assert pieces("a").input_ids == [1] * bos + [3 + PIECES.index("▁a")] + [2] * eos


def test_a_space_before_byte_level_text(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_space_prefix": True}
    path = tmp_path / "toy.gguf"
    assert read_gguf(write_gguf(path, "gpt2", toy_model("gpt2"), pre="gpt-2", keys=keys)).tokenizer.tokenize("hi") == [
        "Ġ",
        "hi",
    ]
    with pytest.raises(ModelError, match=r"sets tokenizer\.ggml\.add_space_prefix to True, which is not supported"):
        read_gguf(llama(tmp_path, keys=keys))


@pytest.mark.parametrize("key", ["add_sep_token", "remove_extra_whitespaces", "normalizer.lowercase"])
def test_other_ways_to_tokenize_are_refused(tmp_path: Path, key: str) -> None:
    name = f"tokenizer.ggml.{key}"
    read_gguf(llama(tmp_path, keys={name: False}))
    with pytest.raises(ModelError, match=f"sets {name} to True, which is not supported"):
        read_gguf(llama(tmp_path, keys={name: True}))


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, [2, 0]),
        ({"eos_token_id": None}, [0, 2]),
        ({"eos_token_id": 7}, [7, 0, 2]),
        ({"eot_token_id": 5}, [2, 5, 0]),
        ({"eom_token_id": 6, "eot_token_id": 5}, [2, 5, 6, 0]),
        ({"eos_token_ids": [9, 8]}, [2, 9, 8, 0]),
        ({"fim_sep_token_id": 4}, [2, 4, 0]),
    ],
)
def test_all_ends_of_a_turn_are_ends(tmp_path: Path, keys: dict[str, Any], ends: list[int]) -> None:
    """<|endoftext|> and <|im_end|> are ends in every file that has them."""
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = llama(tmp_path, keys=changed)
    assert read_gguf(path).config["eos_token_id"] == ends
    assert load_target(str(path)).config.eos_token_ids == tuple(ends)


def test_ordinary_text_is_no_end() -> None:
    tokens = ["a", "</s>", "<EOT>", "<end_of_turn>"]
    assert end_tokens({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 1, 3, 1]}) == [2, 3]
    assert end_tokens({"tokenizer.ggml.tokens": tokens}) == [1, 2, 3]


def test_an_end_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 5000}
    path = llama(tmp_path, keys=keys)
    with pytest.raises(ModelError, match=r"eos_token_id .* must be a token id below 261"):
        load_target(str(path))


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    path = llama(tmp_path, pre="esperanto")
    with pytest.raises(ModelError, match=r"'esperanto'; supported are .*smollm"):
        read_gguf(path)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, dtype=np.float32))
    finish(writer)
    with pytest.raises(
        ModelError,
        match=r"'mamba' \(.*\); supported are gemma, gemma2, gemma3, gpt-oss, gpt2, gptneox, granite, llama,",
    ):
        read_gguf(tmp_path / "toy.gguf")


@pytest.mark.parametrize("keep", [0, 3, 20, 60, 1000, 5000, -5000, -1])
def test_a_truncated_file_is_a_sentence(tmp_path: Path, keep: int) -> None:
    path = llama(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(FileError, match=r"truncated or damaged .* fetch it again"):
        read_gguf(path)


def test_random_damage_never_shows_a_foreign_error(tmp_path: Path) -> None:
    path = llama(tmp_path)
    whole = bytearray(path.read_bytes())
    generator = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in generator.integers(0, 6000, size=8):
            damaged[at] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except (FileError, ModelError):
            continue


def test_not_a_gguf_file_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model, " * 100)
    with pytest.raises(FileError, match="not a GGUF file"):
        read_gguf(tmp_path / "text.gguf")
    with pytest.raises(FileError, match="there is no GGUF file"):
        read_gguf(tmp_path / "absent.gguf")
