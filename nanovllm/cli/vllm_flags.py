"""Flags of `vllm serve` that this server does not have, so that a command line from vLLM's
documentation can be pasted.

A flag is ignored, with a line in the log, if the server answers as the flag promises without it
(performance, logs, images). It is rejected, with a sentence that names the alternative, if answers,
access or memory would differ."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanovllm.data.errors import UsageError
from nanovllm.data.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True)
class FlagGroup:
    """Flags that get the same answer.

    Attributes:
        answer: why the flags have no effect, or what to do instead.
        switches: flags without a value; `--no-` before the name turns each off.
        values: flags with one value.
        lists: flags with one or more values.
        optional: flags with one value or none.
    """

    answer: str
    switches: str = ""
    values: str = ""
    lists: str = ""
    optional: str = ""

    def names(self) -> list[str]:
        """The names of all flags, without dashes."""
        return f"{self.switches} {self.values} {self.lists} {self.optional}".split()


# vLLM's other names of flags that the server has.
ALIASES = {
    "quantization": ["-q"],
    "enable-expert-parallel": ["-ep"],
    "num-kv-blocks": ["--num-gpu-blocks-override"],
    "kv-cache-memory": ["--kv-cache-memory-bytes"],
}
SHORT_NAMES = {
    "api-server-count": "-asc",
    "attention-config": "-ac",
    "compilation-config": "-cc",
    "data-parallel-address": "-dpa",
    "data-parallel-backend": "-dpb",
    "data-parallel-external-lb": "-dpe",
    "data-parallel-hybrid-lb": "-dph",
    "data-parallel-rank": "-dpn",
    "data-parallel-rpc-port": "-dpp",
    "data-parallel-size-local": "-dpl",
    "data-parallel-start-rank": "-dpr",
    "decode-context-parallel-size": "-dcp",
    "nnodes": "-n",
    "node-rank": "-r",
    "optimization-level": "-O",
    "prefill-context-parallel-size": "-pcp",
}
# Values that ask for what the server does anyway: neither a line in the log nor an error.
NEUTRAL = {
    "chat-template-content-format": ["auto", "string", "openai"],
    "config-format": ["auto", "hf"],
    "convert": ["auto", "none"],
    "cpu-offload-gb": ["0", "0.0"],
    "data-parallel-backend": ["mp"],
    "data-parallel-rank": ["0"],
    "data-parallel-start-rank": ["0"],
    "decode-context-parallel-size": ["1"],
    "guided-decoding-backend": ["auto"],
    "kv-offloading-backend": ["native"],
    "logprobs-mode": ["raw_logprobs"],
    "max-logprobs": [str(number) for number in range(MAX_LOGPROBS + 1)],
    "model-impl": ["auto", "vllm"],
    "nnodes": ["1"],
    "node-rank": ["0"],
    "override-generation-config": ["{}"],
    "hf-overrides": ["{}"],
    "prefill-context-parallel-size": ["1"],
    "response-role": ["assistant"],
    "runner": ["auto", "generate"],
    "ssl-cert-reqs": ["0"],
    "task": ["auto", "generate"],
    "tokenizer-mode": ["auto", "hf"],
    "worker-cls": ["auto"],
}

IGNORED = (
    FlagGroup(
        "code in a model's folder is never run",
        switches="trust-remote-code",
        values="code-revision",
    ),
    FlagGroup(
        "the server describes and parses tool calls for every model",
        switches="enable-auto-tool-choice",
        values="tool-call-parser",
    ),
    FlagGroup(
        "models are text only",
        switches=(
            "disable-chunked-mm-input disable-mm-preprocessor-cache enable-mm-embeds "
            "enable-mm-processor-stats interleave-mm-strings language-model-only mm-encoder-only "
            "skip-mm-profiling"
        ),
        values=(
            "allowed-local-media-path limit-mm-per-prompt media-io-kwargs mm-encoder-attn-backend "
            "mm-encoder-tp-mode mm-processor-cache-gb mm-processor-cache-type mm-processor-kwargs "
            "mm-shm-cache-max-object-size-mb video-pruning-rate"
        ),
        lists="allowed-media-domains",
    ),
    FlagGroup(
        "/metrics, the statistics in the log and --trace show what the server does",
        switches=(
            "aggregate-engine-logging cudagraph-metrics disable-log-requests "
            "disable-uvicorn-access-log enable-layerwise-nvtx-tracing enable-log-deltas "
            "enable-log-outputs enable-log-requests enable-logging-iteration-details "
            "enable-mfu-metrics enable-server-load-tracking kv-cache-metrics log-error-stack "
            "ray-workers-use-nsight"
        ),
        values=(
            "disable-access-log-for-endpoints kv-cache-metrics-sample log-config-file max-log-len "
            "otlp-traces-endpoint profiler-config show-hidden-metrics-for-version "
            "uvicorn-log-level"
        ),
        lists="collect-detailed-traces",
    ),
    FlagGroup(
        "the engine tunes itself",
        switches=(
            "calculate-kv-scales disable-async-output-proc disable-cascade-attn "
            "disable-frontend-multiprocessing disable-hybrid-kv-cache-manager "
            "disable-nccl-for-dp-synchronization enable-dbo enable-flashinfer-autotune "
            "kv-sharing-fast-prefill multi-step-stream-outputs use-tqdm-on-load "
            "use-v2-block-manager"
        ),
        values=(
            "additional-config all2all-backend api-server-count attention-config "
            "compilation-config cp-kv-cache-interleave-size dbo-decode-token-threshold "
            "dbo-prefill-token-threshold dcp-kv-cache-interleave-size expert-placement-strategy "
            "linear-backend mamba-block-size mamba-cache-dtype mamba-cache-mode "
            "mamba-ssm-cache-dtype max-cudagraph-capture-size max-long-partial-prefills "
            "max-num-partial-prefills max-parallel-loading-workers max-seq-len-to-capture "
            "model-loader-extra-config moe-backend num-lookahead-slots num-scheduler-steps "
            "optimization-level performance-mode prefix-caching-hash-algo pt-load-map-location "
            "safetensors-load-strategy scheduler-delay-factor stream-interval "
            "tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type ubatch-size"
        ),
        lists="cuda-graph-sizes cudagraph-capture-sizes ignore-patterns",
    ),
    FlagGroup("one library compiles all grammars", values="guided-decoding-backend"),
    FlagGroup(
        "the server's limits are fixed, see --help",
        values="h11-max-header-count h11-max-incomplete-event-size",
    ),
    FlagGroup("usage always has them", switches="enable-prompt-tokens-details"),
    FlagGroup("the page /docs never needs a network", switches="enable-offline-docs"),
    FlagGroup(
        "content is converted to what the chat template reads",
        values="chat-template-content-format",
    ),
)

REJECTED = (
    FlagGroup(
        "there are no adapters: merge the adapter into the model's weights (merge_and_unload of "
        "peft), and serve the new folder",
        switches=(
            "enable-lora enable-lora-bias enable-prompt-adapter enable-tower-connector-lora "
            "fully-sharded-loras specialize-active-lora"
        ),
        values=(
            "default-mm-loras lora-dtype lora-extra-vocab-size max-cpu-loras max-lora-rank "
            "max-loras max-prompt-adapter-token max-prompt-adapters qlora-adapter-name-or-path"
        ),
        lists="lora-modules prompt-adapters",
    ),
    FlagGroup(
        "reasoning stays in the answer's text, as the model writes it: remove the flag, and "
        "separate it in the client",
        values="reasoning-parser",
    ),
    FlagGroup(
        "save the template as chat_template.jinja in the model's folder", values="chat-template"
    ),
    FlagGroup(
        "clients send chat_template_kwargs with each request", values="default-chat-template-kwargs"
    ),
    FlagGroup(
        "a template from a client is never run: save it as chat_template.jinja in the model's "
        "folder",
        switches="trust-request-chat-template",
    ),
    FlagGroup(
        "the server loads no other code: remove the flag",
        values=(
            "io-processor-plugin logits-processor-pattern reasoning-parser-plugin scheduler-cls "
            "tool-parser-plugin tool-server worker-cls worker-extension-cls"
        ),
        lists="logits-processors middleware",
    ),
    FlagGroup(
        "the server speaks HTTP only: let a reverse proxy on this machine do TLS",
        switches="enable-ssl-refresh",
        values="ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile",
    ),
    FlagGroup("use --host 127.0.0.1 and --port", values="uds"),
    FlagGroup("let the reverse proxy remove the prefix from paths", values="root-path"),
    FlagGroup("hide /docs and /openapi.json with a reverse proxy", switches="disable-fastapi-docs"),
    FlagGroup("clients ask for it with stream_options", switches="enable-force-include-usage"),
    FlagGroup(
        "answers do not have this: remove the flag",
        switches=(
            "enable-per-request-metrics enable-request-id-headers enable-return-routed-experts "
            "return-tokens-as-token-ids tokens-only"
        ),
        values="logprobs-mode response-role",
    ),
    FlagGroup(f"the maximum is {MAX_LOGPROBS}", values="max-logprobs"),
    FlagGroup(
        "leave tools out of requests that must not use them",
        switches="exclude-tools-when-tool-choice-none",
    ),
    FlagGroup(
        "there is no such endpoint: remove the flag",
        switches="enable-sleep-mode enable-tokenizer-info-endpoint",
    ),
    FlagGroup(
        "the server generates text from text or token ids: serve this model with another engine",
        switches="enable-prompt-embeds skip-tokenizer-init",
        values="convert override-pooler-config pooler-config runner task",
    ),
    FlagGroup(
        "change config.json in a local copy of the model's folder",
        values="hf-config-path hf-overrides rope-scaling rope-theta",
    ),
    FlagGroup(
        "clients send sampling parameters with each request; defaults are in the model's "
        "generation_config.json",
        values="override-generation-config",
    ),
    FlagGroup(
        "models must be in Hugging Face's format", values="config-format model-impl tokenizer-mode"
    ),
    FlagGroup(
        "the tokenizer comes with the model's --revision, or give --tokenizer a folder",
        values="tokenizer-revision",
    ),
    FlagGroup("set the environment variable HF_HOME", values="download-dir"),
    FlagGroup("set the environment variable HF_TOKEN", optional="hf-token"),
    FlagGroup("write the file's settings as flags", values="config"),
    FlagGroup(
        "weights must fit in the device's memory: use --quantization, or more ranks with -tp "
        "or -pp",
        values="cpu-offload-gb",
    ),
    FlagGroup("set --max-model-len to the window's size", switches="disable-sliding-window"),
    FlagGroup("set --dtype", values="override-attention-dtype"),
    FlagGroup(
        "use --speculative-config",
        values=(
            "ngram-prompt-lookup-max ngram-prompt-lookup-min num-speculative-tokens "
            "spec-decoding-acceptance-method speculative-disable-by-batch-size "
            "speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model "
            "speculative-model-quantization"
        ),
    ),
    FlagGroup(
        "use --kv-transfer-config or --kv-offloading-size",
        values="ec-transfer-config kv-events-config kv-offloading-backend weight-transfer-config",
    ),
    FlagGroup(
        "for ranks on several machines use torchrun or --distributed-executor-backend ray; for "
        "several engines, start a server on each machine and `nanovllm router` in front",
        switches="data-parallel-external-lb data-parallel-hybrid-lb headless",
        values=(
            "data-parallel-address data-parallel-backend data-parallel-rank data-parallel-rpc-port "
            "data-parallel-size-local data-parallel-start-rank master-addr master-port nnodes "
            "node-rank"
        ),
    ),
    FlagGroup(
        "a request's context is on one rank: use -tp",
        values="decode-context-parallel-size prefill-context-parallel-size",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the parser read the flags, which its help does not list. Flags that the server has keep
    their meaning."""
    for name, others in ALIASES.items():
        action = parser._option_string_actions[f"--{name}"]
        action.option_strings = [*action.option_strings, *others]
        parser._option_string_actions.update(dict.fromkeys(others, action))
    for group in (*IGNORED, *REJECTED):
        for names, count in (
            (group.values, None),
            (group.lists, "+"),
            (group.optional, "?"),
            (group.switches, 0),
        ):
            for name in names.split():
                options = [f"--{name}"]
                if name in SHORT_NAMES:
                    options.append(SHORT_NAMES[name])
                if count == 0:
                    options.append(f"--no-{name}")
                options = [
                    option for option in options if option not in parser._option_string_actions
                ]
                if options:
                    parser.add_argument(
                        *options,
                        dest="vllm_flags",
                        nargs=count,
                        action=_Remember,
                        help=argparse.SUPPRESS,
                    )
    parser.set_defaults(vllm_flags=())


class _Remember(argparse.Action):
    """Append the flag's name and its values to a tuple; nothing for values that ask for what the
    server does anyway."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        name = self.option_strings[0].removeprefix("--")
        is_off = option_string is not None and option_string.startswith("--no-")
        if not is_off and values not in NEUTRAL.get(name, ()):
            setattr(namespace, self.dest, (*getattr(namespace, self.dest), name))


def answer(flags: Iterable[str]) -> str:
    """Return the line for the log about flags without effect, or "" if there is none.

    Raises:
        UsageError: a flag asks for something that the server does not have; the message names the
            alternative.
    """
    names = list(dict.fromkeys(flags))
    if rejected := _sentences(REJECTED, names):
        raise UsageError(f"not supported: {rejected}")
    ignored = _sentences(IGNORED, names)
    return f"flags of vLLM without effect: {ignored}" if ignored else ""


def _sentences(groups: Iterable[FlagGroup], names: Sequence[str]) -> str:
    """The flags of each group that were given, with the group's answer."""
    sentences = []
    for group in groups:
        if given := [f"--{name}" for name in names if name in group.names()]:
            sentences.append(f"{', '.join(given)} ({group.answer})")
    return "; ".join(sentences)
