"""Types of prompts: text, ids, tensors, arrays, encodings; others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anabranch.errors import InputError
from anabranch.prompts import read_prompts
from toy_text import byte_tokenizer, toy_model

TOKENIZER = byte_tokenizer()
IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        [np.int64(5), torch.tensor(6), np.uint8(7)],
        list(torch.tensor(IDS)),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.uint8),
        np.array(IDS),
        np.array(IDS, np.uint16),
        {"input_ids": IDS},
        {"input_ids": torch.tensor(IDS), "attention_mask": torch.ones(3, dtype=torch.long)},
        {"input_ids": np.array([9, *IDS]), "attention_mask": np.array([False, True, True, True])},
        {"input_ids": [*IDS, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "token_type_ids": [0] * 5},
    ],
)
def test_one_prompt(prompt: Any) -> None:
    assert read_prompts(prompt, TOKENIZER) == (True, [IDS])


@pytest.mark.parametrize(
    "prompt",
    [
        [IDS, [8]],
        [torch.tensor(IDS), np.array([8])],
        [torch.tensor([IDS]), {"input_ids": [8]}],
        {"input_ids": [IDS, [8]]},
        {"input_ids": torch.tensor([[0, 5, 6, 7], [0, 0, 0, 8]]), "attention_mask": [[0, 1, 1, 1], [0, 0, 0, 1]]},
        {"input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])},
        {"input_ids": [torch.tensor(IDS), torch.tensor([8])]},
    ],
)
def test_several_prompts(prompt: Any) -> None:
    assert read_prompts(prompt, TOKENIZER) == (False, [IDS, [8]])


def test_two_dimensions_are_a_list_of_prompts() -> None:
    assert read_prompts(torch.tensor([IDS]), TOKENIZER) == (False, [IDS])
    assert read_prompts(np.array([IDS, IDS]), TOKENIZER) == (False, [IDS, IDS])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_the_tokenizer_decodes_as_its_texts_do(side: str) -> None:
    model = toy_model()
    model.tokenizer.pad_token, model.tokenizer.padding_side = model.tokenizer.eos_token, side
    texts = ["the thing", "a"]
    batch = model.tokenizer(texts, padding=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any(), "one of them is padded"
    wanted = [found.token_ids for found in model.generate(texts, max_new_tokens=6)]
    found = model.generate(batch, max_new_tokens=6)
    assert [one.token_ids for one in found] == wanted
    single = model.tokenizer(texts[0], return_tensors="pt")
    streamed = [token for chunk in model.stream(single, max_new_tokens=6) for token in chunk.token_ids]
    assert streamed == wanted[0]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (torch.tensor([1.0]), "token ids must be integers, got a tensor of float32"),
        (np.array([1.5]), "integers, got an array of float64"),
        (torch.tensor([True]), "got a tensor of bool"),
        (np.array(["a"]), "got an array of <U1"),
        (torch.tensor(5), r"one dimension or two, got the shape \(\)"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"got the shape \(1, 2, 3\)"),
        (torch.zeros(0, dtype=torch.long), "the prompt is empty"),
        (torch.zeros(2, 0, dtype=torch.long), "the prompt is empty"),
        ([torch.tensor([[1], [2]])], "must be one prompt, got 2"),
        ([torch.tensor([0.5])], "integers, got a tensor of float32"),
        ({}, "must contain 'input_ids', got an empty one"),
        ({"ids": IDS}, "must contain 'input_ids', got 'ids'"),
        ({"input_ids": IDS, "pixel_values": 3}, "got 'pixel_values'; leave it out"),
        ({"input_ids": 5}, "must be a list of integers, .* got int"),
        ({"input_ids": "the"}, "got str"),
        ({"input_ids": ["the"]}, "got an item 'the'"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": IDS, "attention_mask": [1, 1]}, "must have the shape"),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 1], [1, 1, 1]]}, "must have the shape"),
        ({"input_ids": IDS, "attention_mask": torch.zeros(3, 3, dtype=torch.long)}, "must have the shape"),
        ({"input_ids": IDS, "attention_mask": [0, 0, 0]}, "marks all of its 3 tokens as padding"),
        ({"input_ids": IDS, "attention_mask": [1, 0, 1]}, "hides token 1 inside the prompt"),
        ({"input_ids": IDS, "attention_mask": torch.tensor([0.0, -3e38, 0.0])}, "got an item 0.0"),
        (iter(IDS), "a prompt must be a string"),
        (5, "got int"),
        (bytearray(b"the"), "got bytearray"),
    ],
)
def test_prompts_of_other_types_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_prompts(prompt, TOKENIZER)
