"""Parts of the Llama model and of its loader, one by one; `test_against_transformers` has the
whole."""

from __future__ import annotations

import pathlib
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.checkpoint.weights import CheckpointError
from nanovllm.lab.bench.local import SHAPES, TINY
from nanovllm.layers.basic import Place
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import rotary_frequencies, rotary_table
from nanovllm.models.loader import build_model, checkpoint_tensors, load_model, load_weights
from tests.oracle import make_checkpoint

LINEAR: dict[str, Any] = TINY | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
ROTARY = {"plain": TINY, "linear": LINEAR, "llama3": SHAPES["Llama-3.2-1B"]}


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_frequencies_are_on_the_cpu(kind: str) -> None:
    with torch.device("meta"):  # as when the loader builds the model
        found = rotary_frequencies(ModelConfig.from_dict(ROTARY[kind]))
    assert found.device.type == "cpu", (
        'pass `device="cpu"`: the model is built where torch\'s default device is "meta"'
    )


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_frequencies_are_those_of_transformers(kind: str) -> None:
    found = rotary_frequencies(ModelConfig.from_dict(ROTARY[kind]))
    torch.testing.assert_close(found, LlamaRotaryEmbedding(LlamaConfig(**ROTARY[kind])).inv_freq)


def test_the_rotary_table_has_cosines_then_sines() -> None:
    config = ModelConfig.from_dict(TINY)
    table, frequencies = rotary_table(config, 7), rotary_frequencies(config)
    assert table.shape == (7, config.head_dim) and table.dtype == torch.float32
    torch.testing.assert_close(
        table[5], torch.cat([(5 * frequencies).cos(), (5 * frequencies).sin()])
    )


def test_every_tensor_of_the_file_gets_to_its_place(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path)
    model = load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)
    tensors = dict(checkpoint_tensors(folder))
    for name, places in model.checkpoint_places().items():
        for place in places:
            assert torch.equal(place.target, tensors[name]), name


def test_only_the_part_of_a_tensor_that_belongs_to_a_place_is_copied() -> None:
    whole = torch.arange(24, dtype=torch.float32).view(6, 4)

    class Model:
        """As on a rank that holds two columns, and the file's two matrices in one tensor."""

        config = ModelConfig.from_dict(TINY)

        def __init__(self) -> None:
            self.first, self.second = torch.zeros(2, 3, 2).unbind()

        def checkpoint_name(self, name: str) -> str:
            return name

        def checkpoint_places(self) -> dict[str, list[Place]]:
            columns = slice(1, 3)
            first = Place(self.first, (slice(0, 3), columns), (6, 4))
            second = Place(self.second, (slice(3, 6), columns), (6, 4))
            return {"both": [first, second]}

    model = Model()
    load_weights(cast(Any, model), [("both", whole)])
    assert torch.equal(model.first, whole[:3, 1:3]), "`place.source` says which part"
    assert torch.equal(model.second, whole[3:, 1:3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"model.norm.weight": torch.zeros(3)}, r"model.norm.weight has shape \[3\]"),
        (lambda t: t | {"model.norm.bias": torch.zeros(3)}, "no place for 'model.norm.bias'"),
        (
            lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"},
            "lacks model.norm.weight",
        ),
    ],
    ids=["another shape", "no place", "missing"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    change: Any, words: str, tmp_path: pathlib.Path
) -> None:
    folder = make_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load_weights(
            build_model(ModelConfig.from_pretrained(folder)),
            change(dict(checkpoint_tensors(folder, only_shapes=True))).items(),
        )


def test_buffers_of_the_file_that_are_not_needed_are_passed_over(tmp_path: pathlib.Path) -> None:
    folder = make_checkpoint(tmp_path)
    tensors = dict(checkpoint_tensors(folder, only_shapes=True))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.empty(4, device="meta")
    load_weights(build_model(ModelConfig.from_pretrained(folder)), tensors.items())
