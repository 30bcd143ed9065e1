"""Predictions: a learner types a number before a measurement, and then sees the two beside each other."""

from __future__ import annotations

from types import EllipsisType

Answer = float | str


class Prediction:
    """A question to answer before the cell that measures: `course.predict("What does a step take?", ..., unit="ms")`.

    The learner puts a number in the place of `...` and runs the cell; the notebook keeps it.

    Args:
        guess: `...` so far.
        unit: of the number.
        among: the answers to choose from, if it is no number.

    Raises:
        ValueError: the guess is no such answer; the message says what would be.
    """

    def __init__(
        self, question: str, guess: Answer | EllipsisType = ..., unit: str = "", among: tuple[str, ...] = ()
    ) -> None:
        self.question, self.guess, self.unit = question, None if isinstance(guess, EllipsisType) else guess, unit
        wanted = f"one of {', '.join(map(repr, among))}" if among else f"a number{unit and f' of {unit}'}"
        is_answer = self.guess in among if among else isinstance(self.guess, int | float)
        if self.guess is not None and not is_answer:
            raise ValueError(f"a prediction is {wanted}, got {guess!r}")
        print(
            f"{question}\nYou predict: {f'put {wanted} in the place of ...' if self.guess is None else self._say(self.guess)}"
        )

    def reveal(self, measured: Answer, formula: Answer | None = None) -> None:
        """Print the prediction and what was measured, and between them what the lecture's own formula says if there is one."""
        said = {"you predicted": self.guess, **({"by the formula": formula} if formula is not None else {})}
        print(self.question)
        for name, value in said.items():
            print(f"{name:>16}: {'nothing yet' if value is None else self._say(value) + _distance(value, measured)}")
        print(f"{'measured':>16}: {self._say(measured)}")

    def _say(self, value: Answer) -> str:
        if isinstance(value, str):
            return value
        return f"{f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'} {self.unit}".rstrip()


def _distance(value: Answer, measured: Answer) -> str:
    if isinstance(value, str) or isinstance(measured, str) or not value > 0 < measured:
        return ": right" if value == measured else ": no"
    ratio = value / measured
    return (
        f", {max(ratio, 1 / ratio):.2g} times too {'high' if ratio > 1 else 'low'}"
        if abs(ratio - 1) > 0.05
        else ": right"
    )
