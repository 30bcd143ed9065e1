"""The training of EAGLE-3 heads: the head in training and the engine's are one function, drafting
is judged as the engine would do it, and a few samples can be learned by heart."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from nanovllm.cli.main import main
from nanovllm.models.config import ModelConfig
from nanovllm.models.eagle import EagleModel, load_draft_model
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import load_model
from nanovllm.offline.eagle_command import TrainingRecipe
from nanovllm.offline.eagle_drafts import DraftStep, SampleDrafter
from nanovllm.offline.eagle_evaluation import LONGEST_DRAFT, evaluate
from nanovllm.offline.eagle_samples import Sample, Samples
from nanovllm.offline.eagle_targets import DraftVocabulary
from nanovllm.offline.eagle_trainer import Trainer, untrained_drafter
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


def make_drafter(
    folder: pathlib.Path, samples: list[Sample], recipe: TrainingRecipe
) -> SampleDrafter:
    return untrained_drafter(load(folder), Samples.pack(samples), recipe, torch.device("cpu"))


@pytest.mark.parametrize("variant", ["llama", "gemma2", *by_night(["llama3-rope", "qwen3"])])
def test_the_head_in_training_is_the_engine_s(
    variant: str, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Drafts from each position of a sample, in float32: one by one through the paged cache, and
    all at once."""
    folder = folder if variant == "llama" else deep(tmp_path / "model", variant)
    train_eagle(str(folder), tmp_path, TrainingRecipe(**RECIPE))
    head = load_draft_model(tmp_path, load(folder), torch.float32, "cpu", 64)
    assert head.aux_layers == (2, 4, 5)
    samples = [
        Sample([1, 7, 9], list(range(20, 34)), greedy=True),
        Sample([5], list(range(90, 100)), greedy=False),
    ]
    trained = make_drafter(folder, samples, TrainingRecipe(**RECIPE))
    ids = head.draft_to_target
    trained.data.vocabulary.draft_to_target.copy_(ids)
    state = torch.load(tmp_path / "training" / "checkpoint.pt", weights_only=True)
    scale = trained.head.scale = state["scale"]
    # In the file are bfloat16 numbers; the head in training gets them, too.
    with torch.no_grad():
        for name, tensor in state["head"].items():
            factor = scale if name == "fc.weight" else 1
            trained.head.weights[name].copy_((tensor * factor).bfloat16() / factor)
        found = [draft.logits for draft in trained.drafts(torch.tensor([0]), 3, free=True)]
    prompt, answer, _ = samples[0]
    token_ids, first = torch.tensor(prompt + answer), len(prompt) - 1
    states = trained.data.aux[: len(token_ids)]
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
    samples = [
        Sample(prompt, reference_tokens(str(folder), prompt, 16), greedy=True) for prompt in prompts
    ]
    drafter = make_drafter(folder, samples, recipe)
    every = torch.arange(4)
    before = evaluate(drafter, every, batch_size=4)["temperature 0"]
    Trainer(drafter, every, recipe).train(math.inf, tmp_path / "checkpoint.pt")
    after = evaluate(drafter, every, batch_size=4)["temperature 0"]
    assert before["acceptance"][0] < 0.3 and min(after["acceptance"][:4]) > 0.7, (before, after)
    assert after["tokens per step"][3] > 3.5
    for i, sample in enumerate(samples):
        # After the prompt's last token the model says answer[0], and the head predicts answer[1].
        [draft] = drafter.drafts(torch.tensor([i]), 1, free=True)
        predicted = drafter.data.vocabulary.draft_to_target[draft.logits.argmax(-1)]
        assert int((predicted == torch.tensor(sample.answer[1:])).sum()) > 10


def test_a_seed_determines_the_head(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Whatever this process has drawn before."""
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        out = train_eagle(str(folder), tmp_path / str(seed), TrainingRecipe(**RECIPE))
        heads.append(load_file(out / "model.safetensors"))
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())
    other = train_eagle(str(folder), tmp_path / "other", TrainingRecipe(**RECIPE | {"seed": 1}))
    assert not torch.equal(
        load_file(other / "model.safetensors")["fc.weight"], heads[0]["fc.weight"]
    )


class ScriptedDrafter(SampleDrafter):
    """Is right at some positions."""

    @staticmethod
    def is_right(place: int, step: int) -> bool:
        return place % 3 >= 1 and (place * 7 + step) % 5 != 0

    def drafts(self, numbers: torch.Tensor, steps: int, free: bool) -> Iterator[DraftStep]:
        samples = self.samples
        rows = [
            (int(samples.offsets[i]) + at, int(samples.offsets[i] + samples.lengths[i]))
            for i in numbers.tolist()
            for at in range(int(samples.starts[i]) - 1, int(samples.lengths[i]) - 2)
        ]
        ids = samples.token_ids
        for step in range(steps):
            places = torch.tensor([min(at + 2 + step, len(ids) - 1) for at, _ in rows])
            right = torch.tensor([self.is_right(at, step) for at, _ in rows])
            yield DraftStep(
                logits=F.one_hot(torch.where(right, ids[places], (ids[places] + 1) % 320), 320),
                places=places,
                is_there=torch.tensor([at + 2 + step < end for at, end in rows]),
            )


def test_the_walk_through_a_sample(folder: pathlib.Path) -> None:
    """A head that is right at some places: the tokens per step are those of decoding step by
    step."""
    made = make_drafter(
        folder,
        [
            Sample([1, 2], list(range(30, 50)), greedy=True),
            Sample([3], list(range(60, 75)), greedy=True),
        ],
        TrainingRecipe(**RECIPE),
    )
    every = torch.arange(320)
    data = replace(made.data, vocabulary=DraftVocabulary(every, every))
    drafter = ScriptedDrafter(made.target, made.head, made.samples, data)
    samples = made.samples
    steps = tokens = 0
    for i in range(2):
        at = int(samples.offsets[i] + samples.starts[i]) - 1
        end = int(samples.offsets[i] + samples.lengths[i])
        while at < end - 2:  # the target has computed position `at`, and chosen the token after it
            count = 0
            while count < 3 and at + 2 + count < end and drafter.is_right(at, count):
                count += 1
            steps, tokens, at = steps + 1, tokens + 1 + count, at + 1 + count
    found = evaluate(drafter, torch.tensor([0, 1]), batch_size=3)
    assert found["temperature 0"]["tokens per step"][2] == round(tokens / steps, 3)


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
