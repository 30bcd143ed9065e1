"""langchain-openai on a server: `python use_langchain.py URL`."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Who is it? Anna is 31 years old."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main() -> None:
    (url,) = sys.argv[1:]
    options: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 200,
        "max_retries": 0,
    }
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", **options)

    whole = model.invoke("Say hello.", max_tokens=12)
    chunks = list(model.stream("Say hello.", max_tokens=12))
    assert "".join(chunk.text for chunk in chunks) == whole.text != ""
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] <= 12

    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            found = model.with_structured_output(Person, method=method, strict=strict).invoke(
                QUESTION
            )
            assert found == Person(name="Anna", age=31), (method, strict, found)

    message = model.bind_tools([get_weather], tool_choice="get_weather").invoke(
        "How is the weather in Paris?"
    )
    (call,) = message.tool_calls
    assert call["name"] == "get_weather" and call["args"].keys() == {"city"}
    assert get_weather.invoke(call["args"]).startswith("sunny in ")


main()
