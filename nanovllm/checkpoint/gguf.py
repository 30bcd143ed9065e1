"""Converts a GGUF file of a Llama model to a checkpoint in Hugging Face format.

The engine reads one format only, so a GGUF file is converted once, when it is fetched. transformers
reads the configuration, and undoes what llama.cpp's converter did to the weights: it quantized and
renamed them, and reordered the rows of the query and key projections. The tokenizer, with its chat
template, is built here from the file's metadata.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanovllm.checkpoint.weights import save_tensors
from nanovllm.data.json import JsonObject


def convert(source: Path, folder: Path) -> None:
    """Write the GGUF file `source` into the existing `folder` as a bfloat16 checkpoint.

    Writes configuration, weights and tokenizer. Weights are dequantized to float32 and rounded to
    bfloat16, to the nearest, once.

    Raises:
        ValueError: the file holds another architecture than Llama, or another tokenizer than a
            byte-level BPE with single digits (`tokenizer.ggml.pre` = "smollm").
        OSError: the folder cannot be written, or the disk is full.
    """
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(source).fields.items()}
    if (architecture := metadata["general.architecture"]) != "llama":
        raise ValueError(
            f"cannot convert a GGUF file of architecture {architecture!r}: only 'llama' is "
            "supported"
        )
    load_tokenizer(metadata).save_pretrained(folder, save_jinja_files=False)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    # 1e-05 instead of 9.99999974e-06.
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    config.save_pretrained(folder)
    special_ids = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    GenerationConfig(**special_ids).save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)  # whose names the weights get
    loaded = load_gguf_checkpoint(
        source, return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )
    save_tensors(loaded["tensors"], folder / "model.safetensors", {"format": "pt"})


def load_tokenizer(metadata: JsonObject) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE, with its chat template, from the metadata of a GGUF file.

    GGUF names the pre-tokenizer but does not describe it. "smollm" is GPT-2's, after every digit
    has been split off: the model never saw two digits in one token, although the vocabulary would
    allow it. transformers' own reader of GGUF tokenizers, and its GPT2Tokenizer, would glue the
    digits together again."""
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"cannot convert the GGUF tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r}: only "
            "'gpt2' with 'smollm' is supported"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [
        token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    own = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for key, name in names.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=metadata["llama.context_length"],
        chat_template=metadata["tokenizer.chat_template"],
        **own,
    )
