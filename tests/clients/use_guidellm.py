"""guidellm on a server: `python use_guidellm.py URL TOKENIZER_FOLDER OUTPUT_FOLDER`. Four requests
in each of OpenAI's two shapes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

REQUESTS, OUTPUT_TOKENS = 4, 8


def run(url: str, tokenizer: str, route: str, report: pathlib.Path) -> dict[str, Any]:
    """The figures of one benchmark."""
    options = {
        "backend": f"kind=openai_http,target={url},model=tiny,request_format={route}",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = pathlib.Path(sys.executable).with_name("guidellm")
    subprocess.run([program, "run", "--disable-console", *words], check=True, timeout=240)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return benchmark["metrics"]


def main() -> None:
    url, tokenizer, folder = sys.argv[1:]
    for number, route in enumerate(("/v1/chat/completions", "/v1/completions")):
        figures = run(url, tokenizer, route, pathlib.Path(folder) / f"{number}.json")
        totals = figures["request_totals"]
        assert totals["errored"] == totals["incomplete"] == 0, totals
        # On a busy machine guidellm may end before it has counted its last request.
        assert REQUESTS - 1 <= totals["successful"] <= REQUESTS, totals
        assert figures["output_token_count"]["successful"]["mean"] == OUTPUT_TOKENS
        first_token = figures["time_to_first_token_ms"]["successful"]
        latency = figures["request_latency"]["successful"]
        assert first_token["count"] == totals["successful"] and first_token["min"] > 0, first_token
        assert first_token["mean"] < 1000 * latency["mean"], (first_token["mean"], latency["mean"])


main()
