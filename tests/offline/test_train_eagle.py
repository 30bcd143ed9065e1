"""The training of EAGLE-3 heads: the head in training and the engine's are one function, drafting
is judged as the engine would do it, and a few samples can be learned by heart."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest
import torch

from nanovllm.cli.main import main
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import EagleModel, load_draft_model
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import load_model
from nanovllm.offline.eagle_command import TrainingRecipe
from nanovllm.offline.eagle_data import Samples
from nanovllm.offline.eagle_trainer import LONGEST_DRAFT, Trainer
from nanovllm.offline.train_eagle import train_eagle
from tests.examples import by_night
from tests.models.test_eagle import Drafter
from tests.oracle import VARIANTS, make_checkpoint, reference_tokens

RECIPE: dict[str, Any] = dict(
    num_samples=8, sample_length=64, draft_vocab_size=64, epochs=2, batch_size=3, device="cpu"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model with as many layers as it takes."""
    return deep(tmp_path_factory.mktemp("deep") / "model", "llama")


def deep(folder: pathlib.Path, variant: str) -> pathlib.Path:
    name, changes = VARIANTS[variant]
    VARIANTS[f"{variant}-deep"] = name, changes | {"num_hidden_layers": 8}
    return make_checkpoint(folder, f"{variant}-deep")


def load(folder: pathlib.Path) -> LlamaForCausalLM:
    config = ModelConfig.from_pretrained(folder)
    return load_model(folder, config, torch.float32, max_positions=64)


@pytest.mark.parametrize("variant", ["llama", "gemma2", *by_night(["llama3-rope", "qwen3"])])
def test_the_head_in_training_is_the_engine_s(
    variant: str, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Drafts from each position of a sample, in float32: one by one through the paged cache, and
    all at once."""
    folder = folder if variant == "llama" else deep(tmp_path / "model", variant)
    train_eagle(str(folder), tmp_path, TrainingRecipe(**RECIPE))
    target, plain = load(folder), load(folder)
    head = load_draft_model(tmp_path, plain, torch.float32, "cpu", 64)
    assert head.aux_layers == (2, 4, 5)
    pairs = [([1, 7, 9], list(range(20, 34)), True), ([5], list(range(90, 100)), False)]
    trainer = Trainer(target, Samples.of(pairs), TrainingRecipe(**RECIPE), torch.device("cpu"))
    state = torch.load(tmp_path / "training" / "checkpoint.pt", weights_only=True)
    # In the file are bfloat16 numbers; the head in training gets them, too.
    trainer.scale, trainer.draft_to_target = state["scale"], head.draft_to_target
    with torch.no_grad():
        for name, tensor in state["head"].items():
            scale = trainer.scale if name == "fc.weight" else 1
            trainer.head.weights[name].copy_((tensor * scale).bfloat16() / scale)
    found = [logits for logits, _, _ in trainer.drafts(torch.tensor([0]), 3, free=True)]
    prompt, answer, _ = pairs[0]
    token_ids, first = torch.tensor(prompt + answer), len(prompt) - 1
    states = trainer.states[: len(token_ids), : 3 * 64]
    for row in range(len(found[0])):
        drafter, end = Drafter(head), first + row + 1  # the verified positions are 0 to end - 1
        x, hidden = drafter(token_ids[1 : end + 1], 0, head.combine_hidden_states(states[:end]))
        for step in range(3):
            logits = head.compute_logits(x[-1:])
            assert torch.allclose(logits[0], found[step][row], atol=1e-4), (row, step)
            x, hidden = drafter(head.draft_to_target[logits.argmax(-1)], end + step, hidden[-1:])


def test_a_few_samples_can_be_learned_by_heart(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    recipe = TrainingRecipe(
        **RECIPE
        | {
            "epochs": 150,
            "steps": 4,
            "draft_vocab_size": 320,
            "batch_size": 4,
            "learning_rate": 1e-2,
        }
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 320, (4, 6), generator=generator).tolist()
    pairs = [(prompt, reference_tokens(str(folder), prompt, 16), True) for prompt in prompts]
    target = load(folder)
    trainer = Trainer(target, Samples.of(pairs), recipe, torch.device("cpu"))
    trainer.training = trainer.held_out = torch.arange(4)
    before = trainer.evaluate()["temperature 0"]
    trainer.train(math.inf, tmp_path / "checkpoint.pt")
    after = trainer.evaluate()["temperature 0"]
    assert before["acceptance"][0] < 0.3 and min(after["acceptance"][:4]) > 0.7, (before, after)
    assert after["tokens per step"][3] > 3.5


def test_the_walk_through_a_sample(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is right at some places: the tokens per step are those of decoding step by
    step."""
    pairs = [([1, 2], list(range(30, 50)), True), ([3], list(range(60, 75)), True)]
    trainer = Trainer(
        load(folder), Samples.of(pairs), TrainingRecipe(**RECIPE), torch.device("cpu")
    )
    trainer.held_out = torch.tensor([0, 1])
    ids = trainer.token_ids

    def drafts(numbers: torch.Tensor, steps: int, free: bool) -> Any:
        rows = [
            (trainer.offsets[i] + at, trainer.offsets[i] + trainer.lengths[i])
            for i in numbers.tolist()
            for at in range(int(trainer.starts[i]) - 1, int(trainer.lengths[i]) - 2)
        ]
        for step in range(steps):
            places = torch.tensor([min(int(at) + 2 + step, len(ids) - 1) for at, _ in rows])
            there = torch.tensor([int(at) + 2 + step < int(end) for at, end in rows])
            right = torch.tensor(
                [int(at) % 3 >= 1 and (int(at) * 7 + step) % 5 != 0 for at, _ in rows]
            )
            target = torch.where(right, ids[places], (ids[places] + 1) % 300)
            numbers_of = {int(token): i for i, token in enumerate(trainer.draft_to_target.tolist())}
            logits = torch.zeros(len(rows), len(numbers_of))
            for row, token in enumerate(target.tolist()):
                logits[row, numbers_of.get(token, 0)] = 1 if token in numbers_of else 0
            yield logits, places, there

    monkeypatch.setattr(trainer, "drafts", drafts)
    trainer.draft_to_target = torch.arange(320)
    steps = tokens = 0
    for i in range(2):
        at, end = (
            int(trainer.offsets[i] + trainer.starts[i]) - 1,
            int(trainer.offsets[i] + trainer.lengths[i]),
        )
        while at < end - 2:  # the target has computed position `at`, and chosen the token after it
            count = 0
            while count < 3 and at + 2 + count < end and at % 3 >= 1 and (at * 7 + count) % 5 != 0:
                count += 1
            steps, tokens, at = steps + 1, tokens + 1 + count, at + 1 + count
    assert trainer.evaluate()["temperature 0"]["tokens per step"][2] == round(tokens / steps, 3)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_the_command(
    folder: pathlib.Path, tmp_path: pathlib.Path, quantize: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "\n".join(
            json.dumps({"messages": [{"role": "user", "content": text}]}) for text in "abcdef"
        )
    )
    data = [] if quantize == "none" else ["--data", str(chats)]
    if (
        data
        and not (folder / "chat_template.jinja").exists()
        and "chat_template" not in (folder / "tokenizer_config.json").read_text()
    ):
        data = ["--data", str(text := tmp_path / "text.txt")]
        text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    words = [
        "--num-samples=6",
        "--sample-length=64",
        "--epochs=2",
        "--batch-size=3",
        "--draft-vocab-size=64",
        "--device=cpu",
    ]
    command = [
        "train-eagle",
        str(folder),
        "--out",
        str(tmp_path / "head"),
        *words,
        *data,
        f"--quantize={quantize}",
    ]
    assert main(command) == 0
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    trained = config["trained"]
    assert trained["batches"] > 2 and all(
        len(each["acceptance"]) == LONGEST_DRAFT for each in trained["held_out"].values()
    )
    plain = load(folder)
    for path in (tmp_path / "head", tmp_path / "head" / "model.safetensors"):
        assert isinstance(load_draft_model(path, plain, torch.float32, "cpu", 64), EagleModel)
    # The same command goes on, and has nothing to do; with other flags it goes on for longer.
    assert main(command) == 0
    again = json.loads((tmp_path / "head" / "config.json").read_text())["trained"]
    assert again["batches"] == trained["batches"] and again["held_out"] == trained["held_out"]
    assert main([*command, "--epochs=3"]) == 0
    assert (
        json.loads((tmp_path / "head" / "config.json").read_text())["trained"]["batches"]
        == trained["batches"] * 3 // 2
    )
    capsys.readouterr()
    assert main([*command, "--draft-vocab-size=32"]) == 2
    assert (
        "has the head of a run with other flags: use these settings, or name another folder"
        in capsys.readouterr().err
    )


def test_bad_flags(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--data", "no/such/file"], "'no/such/file' has nothing to train on"),
        (["--steps", "0"], "steps must be an integer of at least 1"),
        ([], "at least 7 layers"),
    ):
        assert main(["train-eagle", str(tiny_model), "--out", str(tmp_path / "x"), *words]) == 2
        assert message in capsys.readouterr().err
