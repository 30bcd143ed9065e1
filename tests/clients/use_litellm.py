"""litellm on two servers: `python use_litellm.py SMALL_URL LARGE_URL`. The model of the first has a
context of 256 tokens."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import asks the internet for prices

import litellm

SHORT = [{"role": "user", "content": "Say hello."}]
LONG = [{"role": "user", "content": "hello " * 100}]
OVERFLOWS: tuple[dict[str, Any], ...] = (
    {"messages": LONG},
    {"messages": SHORT, "max_tokens": 255},
    {"messages": [{"role": "user", "content": "hello " * 100_000}]},
)


def deployment(provider: str, url: str) -> dict[str, Any]:
    return {"model": f"{provider}/tiny", "api_base": f"{url}/v1", "api_key": "unused"}


def answer_both_ways(provider: str, url: str) -> None:
    """A whole answer and a stream say the same."""
    options: dict[str, Any] = deployment(provider, url) | {
        "messages": SHORT,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = litellm.completion(**options)
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**options, stream=True)
    ]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12 < whole.usage.total_tokens


def overflow_is_recognised(provider: str, url: str) -> None:
    """Each of the server's messages about a request that is too long becomes litellm's own
    error."""
    for overflow in OVERFLOWS:
        for stream in (False, True):
            try:
                litellm.completion(**deployment(provider, url), **overflow, stream=stream)
            except litellm.ContextWindowExceededError as error:
                assert "maximum context length is 256 tokens" in str(error)
            else:
                raise AssertionError(f"a request that is too long was answered: {overflow}"[:200])


def router_falls_back(provider: str, small: str, large: str) -> None:
    """A request that is too long for the first model goes to the second one."""
    models = [
        {"model_name": name, "litellm_params": deployment(provider, url)}
        for name, url in (("small", small), ("large", large))
    ]
    router = litellm.Router(
        model_list=models, context_window_fallbacks=[{"small": ["large"]}], num_retries=0
    )
    options: dict[str, Any] = {"messages": LONG, "max_tokens": 8, "temperature": 0}
    expected = litellm.completion(**deployment(provider, large), **options)
    found = router.completion(model="small", **options)
    assert found.choices[0].message.content == expected.choices[0].message.content
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens > 100


def main() -> None:
    small, large = sys.argv[1:]
    litellm.suppress_debug_info = True
    for provider in ("openai", "hosted_vllm"):
        answer_both_ways(provider, large)
        overflow_is_recognised(provider, small)
        router_falls_back(provider, small, large)


main()
