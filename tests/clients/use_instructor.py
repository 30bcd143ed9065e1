"""instructor on a server: `python use_instructor.py URL`."""

from __future__ import annotations

import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def main() -> None:
    (url,) = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    question = [{"role": "user", "content": "Who is it? Anna is 31 years old."}]
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": question,
        "temperature": 0,
        "max_tokens": 200,
    }
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        patched = instructor.from_openai(client, mode=mode)
        # Without retries, the first answer has to fit.
        found = patched.chat.completions.create(response_model=Person, max_retries=0, **options)
        assert found.model_dump() == {"name": "Anna", "age": 31}, (mode, found)
        *_, last = patched.chat.completions.create_partial(
            response_model=Person, max_retries=0, **options
        )
        assert (last.name, last.age) == ("Anna", 31), (mode, last)


main()
