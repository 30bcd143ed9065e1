"""Drafts change no token: every way to draft, at every temperature, with all options of a request,
on several ranks and engines."""

from __future__ import annotations

import gc
import json
import pathlib
import weakref
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import COURSE_MODEL, EngineConfig
from nanovllm.data.outputs import RequestOutput
from nanovllm.features.speculation.drafter import Drafter
from nanovllm.features.speculation.speculator import Speculator
from nanovllm.models.eagle import read_head, shipped_head
from nanovllm.ops import native
from tests.models.test_eagle import CONFIG, EAGLE1, random_head, write
from tests.oracle import make_checkpoint, reference_tokens

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_kv_blocks": 1024,
    "max_model_len": 160,
    "check_invariants": True,
}
# Tokens that a text consists of: few, so that it repeats itself, and drafts are now right and now
# wrong.
FEW = {token: 60.0 for token in (70, 71, 72, 73)}
FREE: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "logit_bias": FEW}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": FREE | {"temperature": 0},
    "greedy, any token": {"temperature": 0, "max_tokens": 20, "ignore_eos": True},
    "drawn": FREE | {"temperature": 1, "seed": 3},
    "drawn from the likeliest": FREE
    | {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 4},
    "penalties": FREE
    | {
        "temperature": 0.8,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "seed": 2,
    },
    "bad words": FREE
    | {"temperature": 1, "seed": 11, "bad_words_token_ids": [[70, 71], [72, 72, 73], [73, 73]]},
    "several": FREE | {"temperature": 1, "n": 3, "seed": 5},
    "log-probabilities": FREE | {"temperature": 1, "logprobs": 3, "prompt_logprobs": 2, "seed": 6},
    "a stop string": FREE | {"temperature": 1, "stop": ["gff", "fge"], "seed": 7, "logprobs": 0},
    "a late stop string": FREE | {"temperature": 1, "stop": ["g"], "min_tokens": 9, "seed": 8},
    "a stop token": FREE | {"temperature": 1, "stop_token_ids": [73], "min_tokens": 6, "seed": 9},
    "the end of text": {
        "temperature": 1,
        "max_tokens": 40,
        "logit_bias": FEW | {2: 59.0},
        "seed": 10,
    },
    **{f"{count} tokens": FREE | {"temperature": 0, "max_tokens": count} for count in (1, 2, 3, 4)},
}
ALWAYS = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 256, 3]]}
DRAFTS: dict[str, dict[str, Any]] = {
    "n-grams": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "the model itself": {"method": "draft_model", "model": "{itself}"},
    "its 8-bit copy": {"method": "draft_model", "model": "{itself}", "quantization": "w8a8"},
    "another model": {"method": "draft_model", "model": "{other}"},
    "an EAGLE-3 head": {"method": "eagle3", "model": "{eagle3}"},
    "an EAGLE-1 head": {"method": "eagle", "model": "{eagle}"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        name: str(make_checkpoint(folder / name, seed=seed))
        for name, seed in (("itself", 0), ("other", 1))
    }
    made["eagle3"] = str(write(folder / "eagle3", random_head(), CONFIG))
    return made | {"eagle": str(write(folder / "eagle", random_head(eagle3=False), EAGLE1))}


def drafting(name: str, models: dict[str, str], **more: Any) -> dict[str, Any]:
    config = DRAFTS[name] | more
    return config | ({"model": models[config["model"].strip("{}")]} if "model" in config else {})


PROMPTS = [[5 + i * 7 % 300 for i in range(length)] for length in (1, 16, 43)]


def answers(llm: LLM, params: dict[str, dict[str, Any]] = PARAMS) -> list[RequestOutput]:
    """Each prompt with each of the parameters, all at once."""
    pairs = [
        (prompt, SamplingParams(**options)) for options in params.values() for prompt in PROMPTS
    ]
    return llm.generate([p for p, _ in pairs], [params for _, params in pairs], use_tqdm=False)


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> list[RequestOutput]:
    return answers(LLM(models["itself"], **OPTIONS))


def check_equal(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        check_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            check_logprobs(one.logprobs, other.logprobs)
            one, other = (
                msgspec.structs.replace(output, logprobs=None, cumulative_logprob=None)
                for output in (one, other)
            )
            assert one == other, "the token ids, the text or its end"


def check_logprobs(found: Any, expected: Any) -> None:
    """They are the same but for their rounding: torch's log_softmax rounds by the number of
    rows."""
    assert (found is None) == (expected is None)
    for ours, theirs in zip(found or [], expected or [], strict=True):
        assert (ours or {}).keys() == (theirs or {}).keys()
        for token, entry in (theirs or {}).items():
            assert (
                ours[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
                and ours[token].rank == entry.rank
            )


@pytest.mark.parametrize("name", DRAFTS)
def test_no_token_changes(name: str, models: dict[str, str], expected: list[RequestOutput]) -> None:
    llm = LLM(models["itself"], speculative_config=drafting(name, models, **ALWAYS), **OPTIONS)
    for _ in range(2):  # the second time, prompts are in the prefix cache
        check_equal(answers(llm), expected)
    stats = llm.engine.core.stats.spec_decoding
    assert stats.num_drafts > 100 and stats.num_accepted_tokens == sum(
        stats.num_accepted_tokens_per_pos
    )
    assert stats.num_accepted_tokens > 0 or "head" in name  # a random one is never right
    assert stats.num_accepted_tokens < stats.num_draft_tokens <= 3 * stats.num_drafts
    assert stats.num_accepted_tokens_per_pos == sorted(
        stats.num_accepted_tokens_per_pos, reverse=True
    )


# By day a head with each of these; test_features.py has n-grams and a draft model with all but
# ranks.
ENGINES: list[dict[str, Any]] = [
    {"num_kv_blocks": 12, "max_num_seqs": 4},
    {"num_kv_blocks": 12, "max_num_seqs": 4, "preemption_mode": "swap", "swap_space": 0.01},
    {"max_num_batched_tokens": 12, "max_num_seqs": 8},
    {"async_scheduling": True},
    {"enable_prefix_caching": False, "enforce_eager": True, "attention_backend": "torch"},
    {"tensor_parallel_size": 2},
    {"block_size": 1, "num_kv_blocks": 4096},
]
CASES = [
    pytest.param(
        name,
        options,
        marks=[] if "head" in name or "tensor" in str(options) else [pytest.mark.nightly],
    )
    for name in ("n-grams", "its 8-bit copy", "an EAGLE-3 head")
    for options in ENGINES
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_no_token_changes_with(
    name: str, options: dict[str, Any], models: dict[str, str], expected: list[RequestOutput]
) -> None:
    llm = LLM(
        models["itself"], speculative_config=drafting(name, models, **ALWAYS), **(OPTIONS | options)
    )
    check_equal(answers(llm), expected)
    is_tight = options.get("num_kv_blocks") == 12  # drafts have no room, but in moments
    assert llm.engine.core.stats.spec_decoding.num_drafts > 0 or is_tight
    assert llm.engine.core.stats.num_preemptions > 0 or not is_tight
    llm.engine.core.close()


def drafter_of(llm: LLM) -> Any:
    """What makes the drafts of an engine."""
    features = llm.engine.core.runner.features
    [drafter] = [each.drafter for each in features if isinstance(each, Speculator)]
    return drafter


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "w4a16"])
def test_no_token_of_a_quantized_model_changes(quantization: str, models: dict[str, str]) -> None:
    """Also in steps without drafts, which run the same layers in one call, not in parts."""
    found = []
    for more in ({}, {"speculative_config": drafting("an EAGLE-3 head", models, **ALWAYS)}):
        llm = LLM(models["itself"], quantization=quantization, **more, **OPTIONS)
        for most in (None, 0, 2):
            params = SamplingParams(
                temperature=0, max_tokens=20, ignore_eos=True, num_speculative_tokens=most
            )
            found.append(
                [
                    output.outputs[0].token_ids
                    for output in llm.generate(PROMPTS, params, use_tqdm=False)
                ]
            )
            # The last step of all was one without drafts.
            if more:
                assert drafter_of(llm).aux.states == [], "kept, and nobody reads them"
    assert found[1:] == found[:1] * 5 and llm.engine.core.stats.spec_decoding.num_drafts > 20


def test_no_token_changes_in_a_pipeline(
    models: dict[str, str], expected: list[RequestOutput]
) -> None:
    config = drafting("n-grams", models, **ALWAYS)
    llm = LLM(models["itself"], speculative_config=config, pipeline_parallel_size=2, **OPTIONS)
    check_equal(answers(llm), expected)
    assert llm.engine.core.stats.spec_decoding.num_accepted_tokens > 0
    llm.engine.core.close()


@pytest.mark.nightly
@pytest.mark.parametrize("config", [{"method": "eagle3"}, {"method": "ngram"}], ids=str)
def test_no_token_of_the_course_model_changes_on_three_ranks(config: dict[str, Any]) -> None:
    asked = (
        "What is the capital of France, and why is it famous?",
        "Repeat this list ten times: eggs, tea, bread, oil, salt",
    )
    questions, found = [[{"role": "user", "content": each}] for each in asked], []
    for more in ({}, {"speculative_config": config | ALWAYS, "tensor_parallel_size": 3}):
        llm = LLM(COURSE_MODEL, dtype="float32", num_kv_blocks=64, **more)
        outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=90), use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert not more or llm.engine.core.stats.spec_decoding.num_accepted_tokens > 2
        llm.engine.core.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["n-grams", "the model itself"])
def test_drafts_after_a_prefill_elsewhere(name: str, models: dict[str, str]) -> None:
    """The blocks come without the draft model's keys and values: its drafts are worse at first, and
    no token is."""
    config = drafting(name, models, **ALWAYS)
    producer = LLM(models["itself"], kv_role="producer", **OPTIONS)
    consumer = LLM(models["itself"], kv_role="consumer", speculative_config=config, **OPTIONS)
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    asked = {"prompt_token_ids": PROMPTS[-1], "kv_transfer_params": {"do_remote_decode": True}}
    (held,) = producer.generate(asked, first, use_tqdm=False)
    given = {"prompt_token_ids": PROMPTS[-1], "kv_transfer_params": held.kv_transfer_params}
    (output,) = consumer.generate(given, first.clone(max_tokens=40), use_tqdm=False)
    assert output.num_cached_tokens == len(PROMPTS[-1]) - 1
    assert output.outputs[0].token_ids == reference_tokens(models["itself"], PROMPTS[-1], 40)
    assert consumer.engine.core.stats.spec_decoding.num_drafts > 0
    for llm in (producer, consumer):
        llm.engine.core.close()


def test_a_request_can_do_without(models: dict[str, str]) -> None:
    llm = LLM(
        models["itself"],
        speculative_config=drafting("the model itself", models, **ALWAYS),
        **OPTIONS,
    )
    options = PARAMS["greedy, any token"]
    for limit, most in ((0, 0), (1, 1), (2, 2), (100, 3)):
        answers(llm, {"one": options | {"num_speculative_tokens": limit}})
        stats = llm.engine.core.stats.spec_decoding
        assert sum(number > 0 for number in stats.num_accepted_tokens_per_pos) == most


def test_drafts_save_steps(models: dict[str, str]) -> None:
    """The step of the prompt makes a token, the next one another one and the first drafts; each
    further step makes four."""
    llm = LLM(
        models["itself"],
        speculative_config=drafting("the model itself", models, **ALWAYS),
        **OPTIONS,
    )
    llm.generate(
        [PROMPTS[-1]], SamplingParams(temperature=0, max_tokens=33, ignore_eos=True), use_tqdm=False
    )
    assert llm.engine.core.num_steps == 2 + -(-31 // 4)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_model_len", [61, 64])
def test_right_drafts_end_where_the_longest_request_ends(
    block_size: int, max_model_len: int, models: dict[str, str]
) -> None:
    """Accepted drafts near the end leave less room for the next ones than the plan could know."""
    options = OPTIONS | {"block_size": block_size, "max_model_len": max_model_len}
    config = drafting("the model itself", models, **ALWAYS)
    llm = LLM(models["itself"], speculative_config=config, **options)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=100)
    for output, prompt in zip(llm.generate(PROMPTS, params, use_tqdm=False), PROMPTS, strict=True):
        expected = reference_tokens(models["itself"], prompt, max_model_len - len(prompt))
        assert output.outputs[0].token_ids == expected
    stats = llm.engine.core.stats.spec_decoding
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30


@pytest.mark.parametrize("block_size", [1, 4])
def test_no_draft_is_written_to_the_blocks_of_another_request(
    block_size: int, models: dict[str, str]
) -> None:
    """Requests end while another one goes on, whose drafts stay right: its draft model's KV is
    intact."""
    config = drafting("the model itself", models, **ALWAYS)
    options = OPTIONS | {"block_size": block_size, "num_kv_blocks": 4096 // block_size}
    llm = LLM(models["itself"], speculative_config=config, **options)
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=count)
        for count in (100, *range(10, 22))
    ]
    prompts = [[7 + i * 11 % 300 for i in range(10)], *[PROMPTS[1]] * (len(params) - 1)]
    llm.generate(prompts, params, use_tqdm=False)
    stats = llm.engine.core.stats.spec_decoding
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 150


@pytest.mark.parametrize("name", DRAFTS)
def test_an_engine_with_drafts_gives_its_memory_back_at_once(
    name: str, models: dict[str, str]
) -> None:
    """Models, caches and runner are in no cycle, which would keep them until Python collects
    garbage."""
    config = drafting(name, models, **ALWAYS)
    llm = LLM(models["itself"], speculative_config=config, **OPTIONS)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    runner = llm.engine.core.runner
    left = [weakref.ref(each) for each in (runner, runner.model, runner.kv_caches[-1])]
    del runner
    gc.collect()
    gc.disable()
    try:
        del llm
        assert [each() for each in left] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {}, "needs a method"),
        ("nonsense", {}, "must be JSON"),
        ({"method": "medusa"}, {}, "method must be one of ngram, draft_model, eagle, eagle3"),
        ({"method": "ngram", "prompt_lookup": 3}, {}, "did you mean prompt_lookup_m"),
        ({"method": "ngram", "num_speculative_tokens": 0}, {}, "num_speculative_tokens must be"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
            {},
            "prompt_lookup_min .5. is above",
        ),
        ({"method": "draft_model"}, {}, 'add "model"'),
        ({"method": "ngram", "quantization": "w8a8"}, {}, "applies only to method 'draft_model'"),
        (
            {"method": "ngram", "draft_sample_method": "probabilistic"},
            {},
            "do not set draft_sample_method",
        ),
        (
            {"model": "x"},
            {"pipeline_parallel_size": 2},
            "use pipeline_parallel_size 1 or method 'ngram'",
        ),
        ({"method": "ngram"}, {"batching_policy": "static"}, "needs batching_policy"),
    ],
)
def test_refusals(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(
            speculative_config=config if isinstance(config, str) else json.dumps(config), **options
        )


def test_a_draft_model_of_another_vocabulary_is_refused(
    models: dict[str, str], tmp_path: pathlib.Path
) -> None:
    other = make_checkpoint(tmp_path / "other")
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape | {"vocab_size": 300}))
    with pytest.raises(
        ValueError, match="300 tokens, the model 320: a draft model needs the same tokenizer"
    ):
        LLM(
            models["itself"],
            speculative_config={"method": "draft_model", "model": str(other)},
            **OPTIONS,
        )


@pytest.mark.parametrize("name", ["the model itself", "an EAGLE-3 head"])
def test_a_model_with_latent_attention_takes_ngrams_alone(
    name: str, models: dict[str, str], tmp_path: pathlib.Path
) -> None:
    target = str(make_checkpoint(tmp_path / "latent", "deepseek-v2"))
    with pytest.raises(ValueError, match=r"has latent attention, .*: use method 'ngram'"):
        LLM(target, speculative_config=drafting(name, models), **OPTIONS)
    plain, drafts = (
        LLM(target, speculative_config=c, **OPTIONS)
        for c in (None, drafting("n-grams", models, **ALWAYS))
    )
    params = {"greedy": PARAMS["greedy"]}
    check_equal(answers(drafts, params), answers(plain, params))
    assert drafts.engine.core.stats.spec_decoding.num_accepted_tokens > 0


def test_drawn_drafts_of_the_model_itself_are_all_accepted(models: dict[str, str]) -> None:
    """Draft and model have one distribution: min(1, p / q) is 1, up to rounding. Greedy drafts of
    drawn texts are right now and then."""
    shares = {}
    for method in ("probabilistic", "greedy"):
        config = drafting("the model itself", models, draft_sample_method=method, **ALWAYS)
        llm = LLM(models["itself"], speculative_config=config, **OPTIONS)
        answers(
            llm,
            {"drawn": {"temperature": 1, "max_tokens": 40, "ignore_eos": True, "seed": 1, "n": 4}},
        )
        stats = llm.engine.core.stats.spec_decoding
        shares[method] = stats.num_accepted_tokens / stats.num_draft_tokens
    assert shares["probabilistic"] > 0.97 and shares["greedy"] < 0.9


def test_a_head_of_the_other_kind_is_refused(models: dict[str, str]) -> None:
    for method, other in (("eagle", "eagle3"), ("eagle3", "eagle")):
        with pytest.raises(ValueError, match=f"is for method '{other}', not '{method}'"):
            LLM(
                models["itself"],
                speculative_config={"method": method, "model": models[other]},
                **OPTIONS,
            )
    with pytest.raises(ValueError, match=r"nanovllm includes no head for"):
        LLM(models["itself"], speculative_config={"method": "eagle3"}, **OPTIONS)


def test_the_shipped_head_drafts_what_a_few_lines_of_torch_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the hidden states of `transformers`: every draft of a long answer, whatever was accepted
    before it."""
    from transformers import AutoModelForCausalLM

    drafted: list[tuple[int, list[int]]] = []
    propose = Drafter.propose

    def noted(
        self: Drafter, schedule: Any, batch: Any, hidden: Any, emitted: dict[str, list[int]]
    ) -> Any:
        requests, rows = propose(self, schedule, batch, hidden, emitted), self.runner.rows
        for request in requests:
            known = int(rows.num_known[request.row]) + len(emitted[request.request_id])
            drafted.append((known, request.drafts))
        return requests

    monkeypatch.setattr(Drafter, "propose", noted)
    folder = str(resolve_model(COURSE_MODEL))  # as a server names it to its engine
    llm = LLM(
        folder, dtype="float32", num_kv_blocks=64, speculative_config={"method": "eagle3"} | ALWAYS
    )
    question = [{"role": "user", "content": "What is the capital of France, and why is it famous?"}]
    prompt = llm.get_tokenizer().apply_chat_template(question)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    assert llm.engine.core.stats.spec_decoding.num_accepted_tokens > 10
    assert (drafter_of(llm).model.fused is not None) == native.is_available(), (
        "the head's layer runs in one call"
    )

    file = shipped_head(COURSE_MODEL)
    assert file is not None
    config, tensors = read_head(file)
    t = {
        name: tensor.double() if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in tensors.items()
    }
    model = AutoModelForCausalLM.from_pretrained(resolve_model(COURSE_MODEL), dtype=torch.float32)
    with torch.inference_mode():
        states = model.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        aux = torch.cat(
            [states[layer][0] for layer in config["eagle_aux_hidden_state_layer_ids"]], 1
        )
        for known, found in drafted:
            if known > len(text):  # behind an end of text among accepted drafts
                continue
            ids, hidden, wanted = text[1:known], aux[: known - 1] @ t["fc.weight"].T, []
            for _ in found:
                out = head(t, model.model.embed_tokens.weight[ids], hidden)
                best = int(
                    product(
                        t, F.rms_norm(out[-1:], out.shape[1:], t["norm.weight"], 1e-5), "lm_head"
                    ).argmax()
                )
                wanted.append(best + int(tensors["d2t"][best]))
                # Of what the head has made itself, only the last row is new.
                ids, hidden = [*ids, wanted[-1]], torch.cat([hidden, out[-1:]])
            assert found == wanted


def product(t: dict[str, torch.Tensor], x: torch.Tensor, name: str) -> torch.Tensor:
    """With weights of 8 bits, and x rounded to 8 bits for each token."""
    scale = x.abs().amax(1, keepdim=True) / 127
    sums = (x / scale).round().double() @ t[f"{name}.weight"].T
    return sums.float() * scale * t[f"{name}.weight_scale"].T


def head(t: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """EAGLE-3's layer over a whole text, dense: hidden states before the norm,
    `[num_tokens, hidden_size]`."""
    t = {
        name.removeprefix("midlayer.").replace("self_attn.", "").replace("mlp.", ""): v
        for name, v in t.items()
    }
    size, width, count = hidden.shape[1], 64, len(hidden)
    x = torch.cat(
        [
            F.rms_norm(embedded, (size,), t["input_layernorm.weight"], 1e-5),
            F.rms_norm(hidden, (size,), t["hidden_norm.weight"], 1e-5),
        ],
        1,
    )
    angles = torch.outer(
        torch.arange(count), 100000 ** -(torch.arange(0, width, 2) / width)
    ).repeat(1, 2)[:, None]

    def heads(name: str) -> torch.Tensor:
        return product(t, x, f"{name}_proj").view(count, -1, width)

    def turned(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, dim=-1)
        return y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
    attended = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        .transpose(0, 1)
        .flatten(1)
    )
    out = hidden + product(t, attended, "o_proj")
    y = F.rms_norm(out, (size,), t["post_attention_layernorm.weight"], 1e-5)
    gate, up = product(t, y, "gate_proj"), product(t, y, "up_proj")
    return out + product(t, F.silu(gate) * up, "down_proj")
