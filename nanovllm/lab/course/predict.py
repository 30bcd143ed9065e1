"""Predictions: a learner types a number before a measurement, and then sees the two beside each
other."""

from typing import Any


class Prediction:
    """A question to answer before the cell that measures: `course.predict("What does a step take?",
    ..., unit="ms")`.

    The learner puts a number in the place of `...` and runs the cell; the notebook keeps it.

    Args:
        guess: `...` so far.
        unit: of the number.
        among: the answers to choose from, if it is no number.

    Raises:
        ValueError: the guess is no such answer; the message says what would be.
    """

    def __init__(
        self, question: str, guess: Any = ..., unit: str = "", among: tuple[str, ...] = ()
    ) -> None:
        self.question = question
        self.guess = guess
        self.unit = unit
        wanted = (
            f"one of {', '.join(map(repr, among))}"
            if among
            else f"a number{unit and f' of {unit}'}"
        )
        if guess is not ... and not (guess in among if among else isinstance(guess, int | float)):
            raise ValueError(f"a prediction is {wanted}, got {guess!r}")
        said = f"put {wanted} in the place of ..." if guess is ... else self._say(guess)
        print(f"{question}\nYou predict: {said}")

    def reveal(self, measured: float | str, formula: float | str | None = None) -> None:
        """Print the prediction and what was measured, and between them what the lecture's own
        formula says if there is one."""
        print(self.question)
        for source, value in (("you predicted", self.guess), ("by the formula", formula)):
            if value is not None:
                said = (
                    "nothing yet" if value is ... else self._say(value) + _distance(value, measured)
                )
                print(f"{source:>16}: {said}")
        print(f"{'measured':>16}: {self._say(measured)}")

    def _say(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        return f"{value:{',.0f' if abs(value) >= 1000 else '.3g'}} {self.unit}".rstrip()


def _distance(value: Any, measured: Any) -> str:
    if isinstance(value, str) or not value > 0 < measured:
        return ": right" if value == measured else ": no"
    ratio = value / measured
    if abs(ratio - 1) <= 0.05:
        return ": right"
    return f", {max(ratio, 1 / ratio):.2g} times too {'high' if ratio > 1 else 'low'}"
