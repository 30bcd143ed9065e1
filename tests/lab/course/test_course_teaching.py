"""What lectures import: `extend` and the checker of exercises."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nanovllm.lab.course import Exercise, extend


def make_pool() -> type:
    class Pool:
        """Blocks."""

        def __init__(self) -> None:
            self.taken = 0

        def free(self) -> int:
            return 1

        @property
        def used(self) -> int:
            return self.taken

    return Pool


def test_extend_reaches_objects_made_before() -> None:
    Pool = original = make_pool()
    pool = Pool()

    @extend
    class Pool(Pool):  # type: ignore[no-redef, misc, valid-type]
        limit = 3

        def free(self) -> int:
            return 2

        @staticmethod
        def least() -> int:
            return 0

        @property
        def used(self) -> int:
            return -self.taken

    assert Pool is original and Pool.__doc__ == "Blocks."
    pool.taken = 5
    assert (pool.free(), pool.least(), pool.limit, pool.used) == (2, 0, 3, -5)
    assert Pool.__mro__ == (original, object)


def test_extend_replaces_the_docstring() -> None:
    Pool = make_pool()

    @extend
    class Pool(Pool):  # type: ignore[no-redef, misc, valid-type]
        """Counted blocks."""

    assert Pool.__doc__ == "Counted blocks."


def test_extend_completes_an_abstract_class() -> None:
    class Backend(abc.ABC):
        @abc.abstractmethod
        def forward(self) -> int: ...

    @extend
    class Backend(Backend):  # type: ignore[no-redef]
        def forward(self) -> int:
            return 1

    assert Backend().forward() == 1


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


@pytest.mark.parametrize(
    "wrap", [lambda f: f, property, classmethod, logged, functools.cached_property, functools.cache]
)
def test_extend_refuses_super_without_arguments(wrap: Callable[..., Any]) -> None:
    Pool = original = make_pool()
    with pytest.raises(TypeError, match=r"Pool: a method uses super\(\) without arguments"):

        @extend
        class Pool(Pool):  # type: ignore[no-redef, misc, valid-type]
            fine = 1

            @wrap
            def late(self) -> Any:
                return [super().__repr__() for _ in range(1)]

    assert not hasattr(original, "fine"), "a refused class must change nothing"


def test_extend_allows_super_of_a_class_inside() -> None:
    Pool = make_pool()

    @extend
    class Pool(Pool):  # type: ignore[no-redef, misc, valid-type]
        class Block:
            def __repr__(self) -> str:
                return super().__repr__()

    assert "Block" in repr(Pool.Block())


def test_extend_refuses_dataclass_fields_but_not_class_variables() -> None:
    @dataclass
    class Config:
        size: int

    original = Config
    with pytest.raises(TypeError, match=r"Config.depth: @dataclass has already run"):

        @extend
        class Config(Config):  # type: ignore[no-redef]
            depth: int = 1

    Config = original

    @extend
    class Config(Config):  # type: ignore[no-redef]
        limit: ClassVar[int] = 3

    assert Config(1).limit == 3


def test_extend_refuses_other_classes_and_slots() -> None:
    Pool = make_pool()
    with pytest.raises(TypeError, match=r"write `class Other\(Other\):`"):

        @extend
        class Other:
            pass

    with pytest.raises(TypeError, match="__slots__"):

        @extend
        class Pool(Pool):  # type: ignore[no-redef, misc, valid-type]
            __slots__ = ("x",)


def slot_of(table: list[int], token: int) -> int:
    return table[token // 4] * 4 + token % 4


SLOTS = [(([7, 2], 0), 28), (([7, 2], 5), 9), (([7], 4), IndexError)]


def test_check_accepts_a_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert Exercise("Slots", SLOTS).check(slot_of)
    assert capsys.readouterr().out == "Slots: right, all 3 cases.\n"


def unsolved(table: list[int], token: int) -> int:
    raise NotImplementedError


def test_check_of_a_stub_does_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Exercise("Slots", [lambda f: f([1], 0)]).check(unsolved)
    assert not Exercise("Slots", SLOTS).check(unsolved)
    assert capsys.readouterr().out == "Slots: not solved yet.\n" * 2


@pytest.mark.parametrize(
    ("answer", "number", "complaint"),
    [
        (lambda table, token: table[token // 4] * 4, 2, "should return 9; it returned 8"),
        (
            lambda table, token: None,
            1,
            "should return 28; it returned None (is a `return` missing?)",
        ),
        (
            lambda table, token: table.popitem(),
            1,
            "it raised AttributeError: 'list' object has no attribute 'popitem'",
        ),
        (
            lambda table, token: (table * 2)[token // 4] * 4 + token % 4,
            3,
            "should raise IndexError; it returned 28",
        ),
    ],
)
def test_check_says_what_is_wrong(
    answer: Callable[..., Any], number: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not Exercise("Slots", SLOTS).check(answer)
    report = capsys.readouterr().out
    assert report.startswith(f"Slots: case {number} of 3 is wrong.\n  <lambda>([7")
    assert complaint in report


def test_check_probes_classes_by_assertions(capsys: pytest.CaptureFixture[str]) -> None:
    def starts_empty(pool: type) -> None:
        assert pool().used == 0, "a new pool has handed out nothing"

    exercise = Exercise("Pool", [starts_empty])
    assert exercise.check(make_pool())
    assert not exercise.check(type("Full", (), {"used": 1}))
    assert not exercise.check(type("Broken", (), {}))
    out = capsys.readouterr().out
    assert "Pool: case 1 of 1 is wrong.\n  a new pool has handed out nothing\n" in out
    assert "it raised AttributeError: 'Broken' object has no attribute 'used' (line " in out


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (float("nan"), float("nan"), True),
        ([1, 0.1 + 0.2], [1, 0.3], True),
        ((1, 2), [1, 2], False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (torch.tensor([0.1]) * 3, torch.tensor([0.3]), True),
        (torch.zeros(1, 2), torch.zeros(2), False),
        (np.array([1, 2]), np.array([1, 3]), False),
    ],
)
def test_check_forgives_rounding_only(result: Any, expected: Any, same: bool) -> None:
    assert Exercise("Same", [(0, expected)]).check(lambda x: result) is same


def test_check_does_not_let_a_function_spoil_its_cases() -> None:
    cases = [(([3, 1],), 1)]
    assert Exercise("Least", cases).check(lambda values: values.sort() or values[0])
    assert cases == [(([3, 1],), 1)]


def test_hints_come_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    exercise = Exercise("Slots", SLOTS, hints=["Divide.", "And take the rest."])
    for _ in range(3):
        exercise.hint()
    assert capsys.readouterr().out.splitlines() == [
        "Hint 1 of 2: Divide.",
        "Hint 2 of 2: And take the rest.",
        "Slots: no more hints; the solution is below.",
    ]
