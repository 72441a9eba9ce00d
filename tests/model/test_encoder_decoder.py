"""Encoder-decoder models against transformers': whole forwards, cache reuse, ragged batches, trees, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import CHANNELS, FRAMES, PAIRS, Pair, pair_hf, save_pair
from test_parity import PARENTS, PATHS, advance, chains, run
from torch import Tensor

from anabranch.errors import InputError, ModelError
from anabranch.model.config import RelativeConfig
from anabranch.model.encoder import Source
from anabranch.model.families import model_config
from anabranch.model.inputs import Inputs
from anabranch.model.load import load_target
from anabranch.model.native_backend import NativeBackend
from anabranch.model.pack import pack_decoder
from anabranch.model.quantize import quantize_decoder
from anabranch.model.relative import buckets_of
from anabranch.model.weights import fill_decoder, fingerprint
from anabranch.native import library as native
from anabranch.tree import DraftTree

FEW = ("t5-gated", "bart", "marian", "whisper")  # differ in every part; the others for thorough runs
SOME = [pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in PAIRS]
# sizes that the kernels take
IN_KERNELS = {"t5": {"d_kv": 32}, "bart": {"encoder_attention_heads": 2, "decoder_ffn_dim": 96}}
KERNELS = pytest.mark.skipif(native.library() is None, reason=f"no native kernels here: {native.why_not()}")


def packed(name: str, kind: str = "float32") -> Pair:
    """A toy whose layers the native kernels run."""
    pair = Pair(name, **IN_KERNELS["t5" if "t5" in name else "bart"])
    if kind != "float32":
        pair.decoder.to(torch.bfloat16)
    if kind in ("int8", "int4"):
        quantize_decoder(pair.decoder, kind)
    pack_decoder(pair.decoder)
    if kind == "int8 cache":
        pair.decoder.quantize_cache()
    assert isinstance(pair.decoder.backend, NativeBackend)
    return pair


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=KERNELS)])
def make(request: pytest.FixtureRequest) -> Callable[[str], Pair]:
    return Pair if request.param == "torch" else packed


@pytest.fixture(scope="module", params=SOME)
def pair(request: pytest.FixtureRequest, make: Callable[[str], Pair]) -> Pair:
    return make(request.param)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to float32's rounding: T5 scales neither attention nor its outputs, so scores are large."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * max(1.0, float(theirs.std())))


def test_one_forward(pair: Pair) -> None:
    source, text = pair.source(19, seed=1), pair.text(23, seed=1)
    cache = pair.decoder.new_cache(1, 64)
    cache.add_row(1, pair.decoder.encode(source))
    theirs = pair.logits(source, text)
    assert theirs.std() > 0.3, "a toy that says nothing tests nothing"
    close(run(pair.decoder, Inputs.of_prompt(text), cache)[0], theirs)
    other = pair.logits(pair.source(19, seed=2), text)
    assert (other - theirs).abs().max() > 0.1, "the source matters"


def test_cache_reuse_in_uneven_pieces(pair: Pair) -> None:
    source, text = pair.source(9, seed=3), pair.text(23, seed=3)
    cache = pair.decoder.new_cache(1, 64)
    cache.add_row(1, pair.decoder.encode(source))
    pieces, start = [], 0
    for width in (1, 7, 3, 1, 1, 10):
        pieces.append(advance(pair.decoder, text[start : start + width], cache))
        start += width
    close(torch.cat(pieces), pair.logits(source, text))


def test_rows_of_different_sources_move_and_leave(pair: Pair) -> None:
    sources = [pair.source(length, seed=length) for length in (5, 17, 2)]
    texts = [pair.text(length, seed=length) for length in (3, 12, 7)]
    cache = pair.decoder.new_cache(4, 64)
    for slot, (source, text) in enumerate(zip(sources, texts, strict=True)):
        cache.add_row(1, pair.decoder.encode(source))
        close(advance(pair.decoder, text, cache, slot), pair.logits(source, text))

    def go_on(width: int) -> None:
        more = [pair.text(width + 1, seed=100 * width + len(text))[1:] for text in texts]
        logits = run(pair.decoder, chains(more), cache)
        cache.commit([list(range(width))] * len(texts))
        for slot, new in enumerate(more):
            texts[slot] = texts[slot] + new
            close(logits[slot], pair.logits(sources[slot], texts[slot])[-width:])

    go_on(4)
    cache.swap(0, 1)
    for rows in (sources, texts):
        rows[0], rows[1] = rows[1], rows[0]
    go_on(1)
    cache = cache.resized(5, 128)
    cache.remove_row(0)  # the last row takes its place
    for rows in (sources, texts):
        rows[0] = rows.pop()
    go_on(3)


def test_each_node_of_a_tree_is_its_path_alone(pair: Pair) -> None:
    """Siblings have the position of their depth, for biases by distance too."""
    source, text = pair.source(11, seed=4), pair.text(9, seed=4)
    nodes = pair.text(len(PARENTS) + 1, seed=5)[1:]
    cache = pair.decoder.new_cache(1, 64)
    cache.add_row(1, pair.decoder.encode(source))
    advance(pair.decoder, text, cache)
    tree = DraftTree(np.array(nodes, np.int64), np.array(PARENTS, np.int64))
    logits = run(pair.decoder, Inputs.of_trees([tree]), cache)[0]
    for node, path in enumerate(PATHS):
        close(logits[node], pair.logits(source, text + [nodes[step] for step in path])[-1])
    cache.commit([PATHS[-1]])
    text = text + [nodes[step] for step in PATHS[-1]]
    close(advance(pair.decoder, [7], cache)[-1], pair.logits(source, [*text, 7])[-1])


@pytest.mark.parametrize("name", SOME)
def test_a_saved_folder_is_the_same_model(name: str, tmp_path: Path) -> None:
    folder, pair = save_pair(name, tmp_path), Pair(name)
    loaded = load_target(str(folder), dtype="float32")
    assert loaded.fingerprint == fingerprint(folder) == fingerprint(pair.decoder)
    source, text = pair.source(8, seed=6), pair.text(5, seed=6)
    cache = loaded.decoder.new_cache(1, 64)
    cache.add_row(1, loaded.decoder.encode(source))
    close(run(loaded.decoder, Inputs.of_prompt(text), cache)[0], pair.logits(source, text))


def test_a_source_is_read_once_while_it_is_in_use() -> None:
    pair = Pair("t5")
    source = pair.source(7, seed=1)
    memory = pair.decoder.encode(source)
    assert pair.decoder.encode(source) is memory
    assert pair.decoder.encode(Source(source.tokens)) is not memory
    del source
    assert len(pair.decoder._memories) == 0


def test_buckets_of_distances() -> None:
    distances = torch.tensor([-9, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 8])
    assert buckets_of(distances, RelativeConfig(8, 8, True)).tolist() == [3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 300)
    for both_ways in (True, False):
        ours = buckets_of(distances, RelativeConfig(32, 128, both_ways))
        theirs = T5Attention._relative_position_bucket(distances, both_ways, 32, 128)
        assert torch.equal(ours, theirs)


@KERNELS
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "int8 cache"])
@pytest.mark.parametrize("name", SOME)
@torch.inference_mode()
def test_a_tree_in_the_kernels_is_its_paths_to_the_bit(name: str, kind: str) -> None:
    """In a batch with another source, and alone."""
    pair = packed(name, kind)
    sources, texts = [pair.source(11, seed=4), pair.source(3, seed=5)], [pair.text(9, seed=4), pair.text(2, seed=5)]
    trees = [
        DraftTree(np.array(pair.text(len(PARENTS) + 1, seed=seed)[1:], np.int64), np.array(PARENTS, np.int64))
        for seed in (6, 7)
    ]
    cache, alone = pair.decoder.new_cache(2, 64), pair.decoder.new_cache(1, 64)
    for slot, (source, text) in enumerate(zip(sources, texts, strict=True)):
        cache.add_row(1, pair.decoder.encode(source))
        advance(pair.decoder, text, cache, slot)
    found = run(pair.decoder, Inputs.of_trees(trees), cache)
    alone.add_row(1, pair.decoder.encode(sources[0]))
    for node, path in enumerate(PATHS):
        alone.rewind(0, 0)
        for token in [*texts[0], *(int(trees[0].tokens[step]) for step in path)]:
            last = advance(pair.decoder, [token], alone)[-1]
        assert torch.equal(found[0][node], last)


def test_quantised_layers_of_both_sides() -> None:
    """Rounding changes scores, and little."""
    pair = Pair("bart")
    source, text = pair.source(8, seed=6), pair.text(5, seed=6)
    quantize_decoder(pair.decoder, "int8")
    cache = pair.decoder.new_cache(1, 64)
    cache.add_row(1, pair.decoder.encode(source))
    apart = (run(pair.decoder, Inputs.of_prompt(text), cache)[0] - pair.logits(source, text)).abs().max()
    assert 1e-4 < apart < 0.2


BAD_SOURCES = {
    "t5": (
        (None, "this model reads a source and writes a text about it; give the request a source"),
        (Source(), "the source is empty; give at least one token"),
        (Source([5] * 4097), "the source has 4097 tokens, but the encoder's limit is 4096; shorten it"),
        (Source([5, 97]), "the source has the token id 97, but the vocabulary ends at 96"),
        (Source(features=torch.zeros(20, 60)), "this model reads a text, got features; give the tokens of a source"),
    ),
    "bart": ((Source([5] * 65), "the source has 65 tokens, but the encoder's limit is 64; shorten it"),),
    "whisper": (
        (Source([5]), f"this model reads features of the shape {(CHANNELS, FRAMES)}, got none"),
        (
            Source(features=torch.zeros(80, 3000)),
            f"this model reads features of the shape {(CHANNELS, FRAMES)}, got features of the shape (80, 3000)",
        ),
    ),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_source_that_cannot_be_read_is_refused(name: str) -> None:
    encoder = Pair(name).decoder.encoder
    assert encoder is not None
    for source, message in BAD_SOURCES[name]:
        with pytest.raises(InputError) as error:
            encoder.check(source)
        assert str(error.value) == message


def test_configs_that_do_not_fit_together() -> None:
    base = {"model_type": "t5", **PAIRS["t5"][1]}
    for field, message in (
        ({"relative_attention_num_buckets": 6}, "relative_attention_num_buckets 6 and"),
        ({"feed_forward_proj": "twice-gelu"}, "feed_forward_proj 'twice-gelu' in the model's config is not supported"),
        ({"decoder_start_token_id": 97}, "decoder_start_token_id 97 in the model's config is not below vocab_size 97"),
        ({"is_encoder_decoder": False}, "t5 models with is_encoder_decoder False in config.json are not supported"),
    ):
        with pytest.raises(ModelError, match=message):
            model_config({**base, **field})


def test_a_file_with_fewer_layers_than_the_config() -> None:
    family, fields = PAIRS["bart"]
    model = pair_hf(family, fields)
    for side in ("encoder", "decoder"):
        config = model_config({**model.config.to_dict(), f"{side}_layers": 9})
        with pytest.raises(ModelError, match=f"the config has 9 {side} layers but the weights have"):
            fill_decoder(config, model.state_dict(), dtype=torch.float32, device=torch.device("cpu"))


def test_head_of_v11_is_its_own(tmp_path: Path) -> None:
    """Published files of T5 v1.1 have a head beside the embedding, whatever their config says."""
    family, fields = PAIRS["t5-gated"]
    model = pair_hf(family, fields)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1.0
    described = json.loads(json.dumps(model.config.to_dict()))
    decoder, _ = fill_decoder(model_config(described), tensors, dtype=torch.float32, device=torch.device("cpu"))
    assert not decoder.config.tied_head
    assert torch.equal(decoder.head.weight, tensors["lm_head.weight"])
