"""`nanovllm bench quality`, against transformers, and from the command line to the file."""

from __future__ import annotations

import json
import math
import pathlib

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from nanovllm.lab.bench.quality import compare, documentation, logprobs
from nanovllm.offline.command import Recipe
from nanovllm.offline.quantize import quantize
from tests.oracle import make_checkpoint, reference_model

TEXTS = [
    [5, 9, 100, 22, 7, 8, 200, 31, 44, 45, 46, 250, 251, 3, 17, 90, 4, 6, 11],
    [66, 67, 68] * 7,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """(original, quantized)."""
    folder = tmp_path_factory.mktemp("models")
    original = make_checkpoint(folder / "original", "gemma2")  # its logits are bounded
    return original, quantize(str(original), folder / "new", Recipe(method="rtn", group_size=32))


def engine(folder: pathlib.Path) -> LLM:
    return LLM(str(folder), dtype="float32", num_kv_blocks=64, enable_prefix_caching=False)


@torch.inference_mode()
def test_figures_are_those_of_transformers(folders: tuple[pathlib.Path, pathlib.Path]) -> None:
    llms = [engine(folder) for folder in folders[::-1]]
    row = compare("x", *llms, TEXTS)
    theirs = [
        [
            reference_model(str(folder))(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
            for text in TEXTS
        ]
        for folder in folders[::-1]
    ]
    for text, expected in zip(TEXTS, theirs[0], strict=True):
        assert torch.allclose(logprobs(llms[0], text), expected, atol=2e-3)
    ours, unquantized = (torch.cat(each) for each in theirs)
    targets = torch.tensor([token for text in TEXTS for token in text[1:]])[:, None]
    assert row["tokens"] == len(targets) == 38
    perplexities = [math.exp(-each.gather(1, targets).mean()) for each in (ours, unquantized)]
    assert [row["perplexity"], row["baseline"]] == pytest.approx(perplexities, rel=1e-3)
    assert row["difference %"] == pytest.approx(
        100 * (perplexities[0] / perplexities[1] - 1), abs=0.2
    )
    kl = torch.nn.functional.kl_div(
        ours, unquantized, reduction="batchmean", log_target=True
    ).item()
    assert row["mean KL"] == pytest.approx(kl, rel=1e-2) and kl > 0.01
    same = (ours.argmax(-1) == unquantized.argmax(-1)).float().mean().item()
    assert row["same top-1 %"] == pytest.approx(100 * same, abs=0.01) and 0 < same < 1


def test_the_same_model_is_as_good_and_chunks_change_nothing(
    folders: tuple[pathlib.Path, pathlib.Path],
) -> None:
    chunked = LLM(
        str(folders[0]), dtype="float32", num_kv_blocks=64, max_num_batched_tokens=5, max_num_seqs=5
    )
    row = compare("x", chunked, engine(folders[0]), TEXTS)
    assert row["mean KL"] == pytest.approx(0, abs=1e-5) and row["difference %"] == pytest.approx(
        0, abs=1e-3
    )
    assert row["same top-1 %"] == 100


def test_log_probabilities_are_those_that_the_engine_gives(
    folders: tuple[pathlib.Path, pathlib.Path],
) -> None:
    llm = engine(folders[1])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": TEXTS[0]}], params, use_tqdm=False)
    ours = logprobs(llm, TEXTS[0])
    assert output.prompt_logprobs is not None
    for i, (token, entry) in enumerate(zip(TEXTS[0][1:], output.prompt_logprobs[1:], strict=True)):
        assert entry is not None and entry[token].logprob == pytest.approx(
            ours[i, token].item(), abs=1e-5
        )


def test_texts_to_judge_on_are_not_those_to_calibrate_on() -> None:
    import importlib

    topics = importlib.import_module("pydoc_data.topics").topics
    text = documentation()
    inside = [topics[name] in text for name in sorted(topics)]
    assert (
        inside[1::2] == [True] * len(inside[1::2]) and sum(inside[::2]) <= 1 and len(text) > 100_000
    )


def test_from_the_command_line_to_the_file(
    folders: tuple[pathlib.Path, pathlib.Path],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [
        "--samples",
        "1",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "8MiB",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(["bench", "quality", str(folders[1]), *options]) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    rows = data["tables"]["Quality"]
    assert [row["text"] for row in rows] == ["Python's documentation", "chats"]
    assert all(row["tokens"] == 254 and row["mean KL"] > 0.001 for row in rows), (
        "texts as long as the model allows"
    )
    assert any(f"against {folders[0]}" in fact for fact in data["facts"]), (
        "the model that was quantized"
    )
    assert "same top-1 %" in capsys.readouterr().out
    words = [
        "bench",
        "quality",
        str(folders[0]),
        *options,
        "--quantization",
        "w8a8",
        "--quantize-head",
    ]
    words.append("--no-enable-prefix-caching")
    assert main(words) == 0
    setting = json.loads((tmp_path / "r.json").read_text())["tables"]["Quality"]
    assert all(0 < a["mean KL"] < b["mean KL"] for a, b in zip(setting, rows, strict=True)), (
        "8 bits are more than 4"
    )
    same = ["bench", "quality", str(folders[1]), "--baseline", str(folders[1]), *options]
    assert main(same) == 0
    assert json.loads((tmp_path / "r.json").read_text())["tables"]["Quality"][0]["mean KL"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-tp", "2"], "do not set -tp, -pp and -dp"),
        (["--samples", "0"], "--samples: must be 1 or more"),
        (["--quantization", "awq"], "does not fit this checkpoint, which is not quantized"),
        (["--baseline", "/nowhere"], "there is no folder or file '/nowhere'"),
    ],
)
def test_mistakes(
    folders: tuple[pathlib.Path, pathlib.Path],
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code = main(["bench", "quality", str(folders[0]), *words])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert code == 2 and message in said and "Traceback" not in said
