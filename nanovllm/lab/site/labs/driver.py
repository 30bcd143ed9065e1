"""Answers the page's worker: runs scenes and tests with the reader's code instead of the
engine's."""

from __future__ import annotations
import __future__

import contextlib
import importlib
import io
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

from nanovllm.core.block_pool import InvariantError
from nanovllm.lab.site.labs import contest, scenes
from nanovllm.lab.site.labs.judge import check, explain

Report = Callable[[str], None]
MISSING = object()
MOST_PRINTED = 4000  # characters
FLAGS = __future__.annotations.compiler_flag


class Edits:
    """The reader's functions, used instead of the engine's until `restore`.

    A function keeps its identity and gets other code, so that every module that has imported it
    runs the reader's.

    Attributes:
        lines: for each text of the reader's, the lines that have run.
        last: the text, by its number, and the line that has run last.
    """

    def __init__(self) -> None:
        self.lines: dict[int, set[int]] = {}
        self.last: tuple[int, int] | None = None
        self._numbers: dict[CodeType, int] = {}
        self._undo: list[Callable[[], object]] = []

    def put_all(self, texts: Mapping[str, str]) -> None:
        """Use the reader's code, by target; see `put`."""
        for number, (target, text) in enumerate(texts.items()):
            self.put(number, target, text)

    def put(self, number: int, target: str, text: str) -> None:
        """Run `text` in the module of `target`, and use the function that it defines.

        Args:
            target: `module:function` or `module:Class.method`.

        Raises:
            SyntaxError: the text is no Python.
            NameError: it does not define the function.
        """
        module_name, _, path = target.partition(":")
        module = importlib.import_module(module_name)
        owner, name = owner_of(module, path)
        code = compile(text, f"<your code {number}>", "exec", FLAGS, dont_inherit=True)
        defined: dict[str, Any] = {}
        exec(code, vars(module), defined)
        function = defined.pop(name, None)
        if isinstance(function, property):
            function = function.fget
        if not isinstance(function, FunctionType):
            raise NameError(f"the code must define {name}")
        original = function_of(owner, name)
        for key, value in defined.items():  # helpers of the reader's
            had = vars(module).get(key, MISSING)
            setattr(module, key, value)
            self._undo.append(partial(_put_back, module, key, had))
        self._undo.append(partial(setattr, original, "__code__", original.__code__))
        self._undo.append(partial(setattr, original, "__defaults__", original.__defaults__))
        original.__code__ = function.__code__
        original.__defaults__ = function.__defaults__
        self.lines[number] = set()
        self._numbers[function.__code__] = number

    def watch(self, frame: FrameType, event: str, argument: object) -> Any:
        """Note the lines of the reader's that run; for `sys.settrace`."""
        number = self._numbers.get(frame.f_code)
        if number is None:
            return None
        if event == "line":
            self.lines[number].add(frame.f_lineno)
            self.last = (number, frame.f_lineno)
        return self.watch

    def restore(self) -> None:
        """Put the engine's functions back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return the message of an exception, and the reader's line: the one that raised it; or,
        if the engine found the fault later, the last one that ran."""
        place = self._place(error) or self.last
        kind = type(error).__name__
        is_invariant = isinstance(error, InvariantError | AssertionError)
        message = str(error) or (explain(error, everywhere=True)[:1] or [kind])[0]
        if not is_invariant and not isinstance(error, SyntaxError | RuntimeError):
            message = f"{kind}: {message}"
        if isinstance(error, SyntaxError):
            message = f"{kind}: {error.msg}"
        return {
            "message": message,
            "invariant": is_invariant,
            "place": place,
            "raised": self._place(error) is not None,
            "note": " ".join(vars(error).get("__notes__", ())),
        }

    def _place(self, error: BaseException) -> tuple[int, int] | None:
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            return _number_of(error.filename, error.lineno)
        frames = traceback.extract_tb(error.__traceback__)
        places = [_number_of(each.filename, each.lineno or 1) for each in frames]
        return next((place for place in reversed(places) if place), None)


def _number_of(filename: str, line: int) -> tuple[int, int] | None:
    if not filename.startswith("<your code "):
        return None
    return int(filename[len("<your code ") : -1]), line


def _put_back(module: Any, name: str, value: object) -> None:
    if value is MISSING:
        delattr(module, name)
    else:
        setattr(module, name, value)


def owner_of(module: Any, path: str) -> tuple[Any, str]:
    """Return the module or class that has a function, and the function's name."""
    cls, _, name = path.rpartition(".")
    return (getattr(module, cls) if cls else module), name


def function_of(owner: Any, name: str) -> FunctionType:
    """Return a function, a method, or the function of a property."""
    found: Any = vars(owner)[name]
    function: Any = found.fget if isinstance(found, property) else found
    assert isinstance(function, FunctionType), name
    return function


def answer(request: str, report: Report) -> str:
    """Answer a request of the page.

    Args:
        request: JSON with `call` ("run", "check" or "score"), the `lab`, and the reader's `texts`
            by target.
        report: takes JSON of what is known before the whole answer is.

    Returns:
        JSON; with "error", if the reader's code has failed.
    """
    asked = json.loads(request)
    calls = {"run": _run, "check": _check, "score": _score}
    edits = Edits()
    printed = io.StringIO()
    try:
        edits.put_all(asked["texts"])
        if edits.lines and asked["call"] != "score":  # which is to be quick
            sys.settrace(edits.watch)
        with contextlib.redirect_stdout(printed):
            found = calls[asked["call"]](asked, edits, lambda news: report(json.dumps(news)))
    except Exception as error:
        found = {"error": edits.describe(error)}
    finally:
        sys.settrace(None)
        edits.restore()
    if text := printed.getvalue():
        found["printed"] = text[:MOST_PRINTED] + ("\n..." if len(text) > MOST_PRINTED else "")
    found["lines"] = {number: sorted(lines) for number, lines in edits.lines.items()}
    return json.dumps(found)


def _run(asked: dict[str, Any], edits: Edits, report: Callable[[Any], None]) -> dict[str, Any]:
    scene = scenes.SCENES[asked["lab"]["scene"]](asked["lab"], asked.get("options", {}), report)
    error = scene.pop("error", None)
    if error is not None:
        scene["error"] = edits.describe(error)
        scene["error"]["continues"] = "note" in scene
        for name in scene.keys() & {"step", "note"}:
            scene["error"][name] = scene.pop(name)
    return scene


def _check(asked: dict[str, Any], edits: Edits, report: Callable[[Any], None]) -> dict[str, Any]:
    lab = asked["lab"]
    return {"tests": check(lab["tests"], lab.get("choices", ()), edits.describe)}


def _score(asked: dict[str, Any], edits: Edits, report: Callable[[Any], None]) -> dict[str, Any]:
    name = asked["contest"]
    edits.restore()
    usual = contest.baselines(name)
    edits.put_all(asked["texts"])
    return contest.score(name, usual, report)
