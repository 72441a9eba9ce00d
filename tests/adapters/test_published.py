"""Published draft heads become adapters that compute the same: on synthetic files of their layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from anabranch.adapters.folder import load_adapter
from anabranch.adapters.published import Converted, convert, read_published
from anabranch.api import Model
from anabranch.errors import AdapterError, FileError
from anabranch.model.load import Target, load_target
from toy_text import ToyFolders
from verbs import Anabranch


@pytest.fixture(scope="module")
def target(toys: ToyFolders) -> Target:
    return load_target(str(toys.model), dtype="float32")


def layer_of(target: Target) -> LlamaForCausalLM:
    """A random model of one layer with the target's sizes, as transformers computes it."""
    config = json.loads((Path(target.name) / "config.json").read_text())
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**(config | {"num_hidden_layers": 1}))).eval()


def eagle(target: Target, *, bias: bool = True, norm: bool = False) -> tuple[dict[str, Tensor], Any]:
    """An EAGLE head as its authors store it, and the layer inside."""
    made = layer_of(target)
    width = target.config.hidden_size
    fc = nn.Linear(2 * width, width, bias=bias)
    weights = {f"fc.{name}": value.detach() for name, value in fc.named_parameters()}
    weights |= {f"layers.0.{name}": value for name, value in made.model.layers[0].state_dict().items()}
    if not norm:
        del weights["layers.0.input_layernorm.weight"]
        made.model.layers[0].input_layernorm = nn.Identity()
    weights["embed_tokens.weight"] = target.decoder.embedding.weight.detach().clone()
    return weights, (fc, made)


def written(folder: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A checkpoint folder with safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.clone() for name, value in weights.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def converted(folder: Path, target: Target) -> Converted:
    return convert(read_published(folder), target)


def refused(message: str, target: Target, folder: Path, *written_files: Any) -> None:
    """Check that a checkpoint with these weights and this config is not converted."""
    with pytest.raises(AdapterError, match=message):
        converted(written(folder, *written_files), target)


@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True)])
def test_eagle_computes_the_same(target: Target, tmp_path: Path, bias: bool, norm: bool) -> None:
    weights, (fc, made) = eagle(target, bias=bias, norm=norm)
    module: Any = converted(written(tmp_path / "eagle", weights), target).module
    width, count = target.config.hidden_size, 7
    embeddings, features = torch.randn(1, count, width), torch.randn(1, count, width)
    with torch.no_grad():
        x = fc(torch.cat((embeddings, features), -1))
        positions = torch.arange(count)[None]
        rotated = made.model.rotary_emb(x, positions)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        theirs = made.model.layers[0](x, attention_mask=mask, position_ids=positions, position_embeddings=rotated)
        cos, sin = target.decoder.rope()(positions, count)
        (ours,) = module.unroll(embeddings, features, cos, sin, 1)
    torch.testing.assert_close(ours, theirs[0] if isinstance(theirs, tuple) else theirs, rtol=1e-4, atol=1e-4)


def test_eagle_as_an_adapter(anabranch: Anabranch, toys: ToyFolders, target: Target, tmp_path: Path) -> None:
    weights, _ = eagle(target)
    source, out = tmp_path / "EAGLE-toy", tmp_path / "adapter"
    source.mkdir()
    torch.save({name: value.half() for name, value in weights.items()}, source / "pytorch_model.bin")
    done = anabranch("convert", source, "--model", toys.model, "--out", out, "--licence", "Apache-2.0")
    assert done.code == 0, done.err
    assert "EAGLE heads in" in done.out
    assert f"--adapter {out} --drafter eagle" in done.out
    loaded = load_adapter(out, target)
    assert loaded.record["dtype"] == "float16"
    assert loaded.record["training"]["converted from"] == "EAGLE heads in EAGLE-toy"
    text = "the cat the cat the"
    with Model(target, [loaded], "eagle") as model:
        ours = model.generate(text, max_new_tokens=12)
        assert ours.stats.draft_nodes
        assert ours.token_ids == model.generate(text, max_new_tokens=12, drafter="none").token_ids
    again = anabranch("convert", source, "--model", toys.model, "--out", out)
    assert again.code == 1
    assert "holds an adapter already" in again.err
    assert anabranch("convert", source, "--model", toys.model, "--out", out, "--force", "--json").code == 0


def test_eagle_of_another_target(target: Target, tmp_path: Path) -> None:
    weights, _ = eagle(target)
    other = weights | {"embed_tokens.weight": torch.randn_like(weights["embed_tokens.weight"])}
    refused("other embeddings", target, tmp_path / "other", other)
    refused(
        r"fc\.weight with the shape \(64, 128\).*asks for \(32, 64\)",
        target,
        tmp_path / "wide",
        weights | {"fc.weight": torch.zeros(64, 128)},
    )
    lacking = {name: value for name, value in weights.items() if "down_proj" not in name}
    refused(r"no layer like this target's.*down_proj", target, tmp_path / "lacking", lacking)
    refused(r"rope_theta 5000.* in its config", target, tmp_path / "theta", weights, {"rope_theta": 5000.0})
    refused("has 2 layers", target, tmp_path / "deep", weights, {"num_hidden_layers": 2})


def test_eagle_3_is_named(target: Target, tmp_path: Path) -> None:
    weights = {"midlayer.hidden_norm.weight": torch.zeros(32), "fc.weight": torch.zeros(32, 96)}
    refused("is an EAGLE-3 head", target, tmp_path / "three", weights)


class Residual(nn.Module):
    """Medusa's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def medusa(target: Target, *, heads: int = 3, layers: int = 2) -> nn.ModuleList:
    """Medusa's heads, whose state dict is what the authors publish."""
    torch.manual_seed(2)
    width, words = target.config.hidden_size, target.config.vocab_size
    made = nn.ModuleList(
        nn.Sequential(*(Residual(width) for _ in range(layers)), nn.Linear(width, words, bias=False))
        for _ in range(heads)
    )
    return made.requires_grad_(False)


def for_vllm(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The same weights in vLLM's names."""
    found = {}
    for name, value in weights.items():
        head, layer, *rest = name.split(".")
        output = int(layer) == layers
        found[f"lm_heads.{head}.weight" if output else f"blocks.{head}.layers.{layer}.{rest[-1]}"] = value
    return found


@pytest.mark.parametrize("form", ["authors'", "prefixed", "vLLM's"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_computes_the_same(target: Target, tmp_path: Path, form: str, layers: int) -> None:
    made = medusa(target, layers=layers)
    weights = dict(made.state_dict())
    if form == "prefixed":
        weights = {f"medusa_head.{name}": value for name, value in weights.items()}
    elif form == "vLLM's":
        weights = for_vllm(weights, layers)
    found = converted(written(tmp_path / "medusa", weights, {"medusa_num_heads": 2}), target)
    module: Any = found.module
    assert found.method.name == "medusa"
    assert module.config.num_heads == 3
    states = torch.randn(5, target.config.hidden_size)
    scored = [
        F.linear(state, weight)
        for state, weight in zip(
            module.predicted(target.decoder, states, torch.zeros(0)).unbind(1), module.weights, strict=True
        )
    ]
    for head, ours in zip(made, scored, strict=True):
        torch.testing.assert_close(ours, head(states))


def test_medusa_as_an_adapter(anabranch: Anabranch, toys: ToyFolders, target: Target, tmp_path: Path) -> None:
    torch.save(medusa(target).state_dict(), tmp_path / "medusa_lm_head.pt")
    done = anabranch(
        *("convert", tmp_path / "medusa_lm_head.pt", "--model", toys.model, "--out", tmp_path / "out", "--json")
    )
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["method"] == "medusa"
    assert record["config"] == {"num_heads": 3, "num_layers": 2, "head": "own", "lora_rank": 0}
    with Model(target, [load_adapter(tmp_path / "out", target)], "medusa") as model:
        ours = model.generate("the cat", max_new_tokens=12)
        assert ours.stats.draft_nodes
        assert ours.token_ids == model.generate("the cat", max_new_tokens=12, drafter="none").token_ids


def test_medusa_of_another_target(target: Target, tmp_path: Path) -> None:
    weights = dict(medusa(target, layers=1).state_dict())
    gap = {name: value for name, value in weights.items() if not name.startswith("1.")}
    refused(r"\[0, 2\] and lacks some", target, tmp_path / "gap", gap)
    lacking = {name: value for name, value in weights.items() if name != "1.1.weight"}
    refused(r"has no 1\.1\.weight", target, tmp_path / "lacking", lacking)
    small = weights | {"0.1.weight": weights["0.1.weight"][:-1]}
    refused(r"0\.1\.weight with the shape \(262, 32\).*asks for \(263, 32\)", target, tmp_path / "small", small)
    many = {f"{head}{name[1:]}": weights[name] for head in range(17) for name in weights if name.startswith("0.")}
    refused("num_heads must be", target, tmp_path / "many", many)


class Conditioned(nn.Module):
    """Hydra's block."""

    def __init__(self, width: int, conditions: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear((1 + conditions) * width, width)
        self.res_connection = nn.Linear((1 + conditions) * width, width) if conditions else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class Heads(nn.Module):
    """Hydra's heads, or Hydra++'s with a prefix layer, in the authors' names."""

    def __init__(self, target: Target, *, prefix: bool, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        width, words = target.config.hidden_size, target.config.vocab_size
        drop = [nn.Dropout(0.0)] if prefix else []
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                *drop,
                Conditioned(width, head + 1),
                *(part for _ in range(layers - 1) for part in (*drop, Conditioned(width))),
            )
            for head in range(heads)
        )
        last = [nn.Linear(width, words) for _ in range(heads)]
        self.hydra_lm_head = nn.ModuleList(nn.Sequential(nn.Dropout(0.0), x) for x in last) if prefix else None
        self.hydra_lm_head = nn.ModuleList(last) if self.hydra_lm_head is None else self.hydra_lm_head
        self.prefix_embeding_layer = layer_of(target).model if prefix else None
        self.eval().requires_grad_(False)

    def forward(self, states_TD: Tensor, path_TKD: Tensor) -> list[Tensor]:
        """Scores of each head [T, V] from states and the embeddings of each position's next tokens."""
        if self.prefix_embeding_layer is not None:
            states_TD = self.prefix_embeding_layer(inputs_embeds=states_TD[None]).last_hidden_state[0]
        read = [states_TD, *path_TKD.unbind(1)]
        pairs = zip(self.hydra_mlp, self.hydra_lm_head, strict=True)
        return [head(mlp(torch.cat(read[: k + 2], -1))) for k, (mlp, head) in enumerate(pairs)]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_hydra_computes_the_same(target: Target, tmp_path: Path, prefix: bool, layers: int) -> None:
    made = Heads(target, prefix=prefix, layers=layers)
    found = converted(written(tmp_path / "hydra", dict(made.state_dict())), target)
    module: Any = found.module
    assert found.method.name == "hydra"
    assert module.num_parameters() == sum(
        value.numel() for name, value in made.state_dict().items() if "embed_tokens" not in name
    )
    states, path = torch.randn(6, target.config.hidden_size), torch.randint(3, 200, (6, 3))
    with torch.no_grad():
        theirs = made(states, target.decoder.embedding(path))
        read = module.prefix(target.decoder, states[None])[0]
        predicted = module.predicted(target.decoder, read, path).unbind(1)
    for ours, weight, bias, wanted in zip(predicted, module.weights, module.biases, theirs, strict=True):
        torch.testing.assert_close(F.linear(ours, weight, bias), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_as_an_adapter(
    anabranch: Anabranch, toys: ToyFolders, target: Target, tmp_path: Path, prefix: bool
) -> None:
    torch.save(Heads(target, prefix=prefix).state_dict(), tmp_path / "hydra_lm_head.pt")
    done = anabranch("convert", tmp_path / "hydra_lm_head.pt", "--model", toys.model, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    with Model(target, [load_adapter(tmp_path / "out", target)], "hydra") as model:
        ours = model.generate(["the cat", "the cat and the"], max_new_tokens=12)
        plain = model.generate(["the cat", "the cat and the"], max_new_tokens=12, drafter="none")
    assert [one.token_ids for one in ours] == [one.token_ids for one in plain]
    assert all(one.stats.draft_nodes for one in ours)


def test_hydra_of_another_form(target: Target, tmp_path: Path) -> None:
    weights = dict(Heads(target, prefix=True, layers=1).state_dict())
    ungrounded = {name: value for name, value in weights.items() if "res_connection" not in name}
    refused(r"has no hydra_mlp\..*res_connection", target, tmp_path / "ungrounded", ungrounded)
    deeper = weights | {"prefix_embeding_layer.layers.1.input_layernorm.weight": torch.zeros(32)}
    refused(r"also has prefix_embeding_layer\.layers\.1", target, tmp_path / "deeper", deeper)
    lacking = {name: value for name, value in weights.items() if "k_proj" not in name}
    refused("no prefix layer like this target's", target, tmp_path / "lacking", lacking)
    refused("before the target's last layer", target, tmp_path / "offset", weights, {"hidden_state_offset": 1})


def test_files_that_cannot_be_read(target: Target, tmp_path: Path) -> None:
    weights, _ = eagle(target)
    with pytest.raises(FileError, match="download the checkpoint first"):
        read_published(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="has no weights"):
        read_published(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(FileError, match="not a file of weights"):
        read_published(tmp_path / "notes.txt")
    torch.save(nn.Linear(2, 2), tmp_path / "code.pt")  # a pickled object, not its weights
    with pytest.raises(FileError, match="could run code"):
        read_published(tmp_path / "code.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(FileError, match="does not hold tensors by name"):
        read_published(tmp_path / "list.pt")
    torch.save(weights, tmp_path / "cut.pt")
    for name in ("cut.pt", "model.safetensors"):
        path = tmp_path / name if name == "cut.pt" else written(tmp_path / "cut", weights) / name
        path.write_bytes(path.read_bytes()[:-300])
        with pytest.raises(FileError, match="truncated"):
            read_published(path)
    folder = written(tmp_path / "twice", weights)
    save_file({"fc.weight": weights["fc.weight"]}, folder / "more.safetensors")
    with pytest.raises(FileError, match=r"fc\.weight in two files"):
        read_published(folder)


def test_tensors_that_cannot_be_used(target: Target, tmp_path: Path) -> None:
    weights, _ = eagle(target)
    refused("are not those of draft heads", target, tmp_path / "unknown", {"conv.weight": torch.zeros(2)})
    refused(r"also has extra\.weight", target, tmp_path / "more", weights | {"extra.weight": torch.zeros(2)})
    for value, words in ((torch.nan, "not finite numbers"), (1, "as int64")):
        wrong = torch.full_like(weights["fc.bias"], value, dtype=torch.int64 if value == 1 else None)
        refused(words, target, tmp_path / words, weights | {"fc.bias": wrong})


def test_a_failed_conversion_leaves_nothing(anabranch: Anabranch, toys: ToyFolders, tmp_path: Path) -> None:
    source = written(tmp_path / "unknown", {"conv.weight": torch.zeros(2)})
    done = anabranch("convert", source, "--model", toys.model, "--out", tmp_path / "out")
    assert done.code == 1
    assert "are not those of draft heads" in done.err
    assert not (tmp_path / "out").exists()
