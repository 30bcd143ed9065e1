"""Predictions: a learner types a number before a measurement, and then sees the two beside each
other. Notebooks also store them as data, of which pages make forms."""

from typing import Any

from nanovllm.lab import stored


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
        asked = {"question": question, "unit": unit, "among": list(among)}
        _show(
            f"{question}\nYou predict: {said}", asked if guess is ... else asked | {"guess": guess}
        )

    def reveal(
        self, measured: float | str, formula: float | str | None = None, *, simulated: bool = False
    ) -> None:
        """Show the prediction and what was measured, and between them what the lecture's own
        formula says if there is one.

        Args:
            measured: the answer.
            formula: the lecture's own prediction.
            simulated: the answer comes from a simulator or a device that sleeps, and is shown as
                simulated.
        """
        lines = [self.question]
        for source, value in (("you predicted", self.guess), ("by the formula", formula)):
            if value is not None:
                said = (
                    "nothing yet" if value is ... else self._say(value) + _distance(value, measured)
                )
                lines.append(f"{source:>16}: {said}")
        lines.append(f"{'simulated' if simulated else 'measured':>16}: {self._say(measured)}")
        answer: dict[str, Any] = {"question": self.question, "unit": self.unit}
        answer["measured"] = _rounded(measured)
        if formula is not None:
            answer["formula"] = _rounded(formula)
        if simulated:
            answer["simulated"] = True
        _show("\n".join(lines), answer)

    def _say(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        return f"{value:{_format(value)}} {self.unit}".rstrip()


class _Stored:
    """A display of a cell: text, and the same as data."""

    def __init__(self, text: str, data: dict[str, Any]) -> None:
        self.text = text
        self.data = data

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {"text/plain": self.text, stored.PREDICTION: self.data}


def _show(text: str, data: dict[str, Any]) -> None:
    """Show it in a notebook; print it elsewhere."""
    from IPython.display import display  # slow, and checks of a reader's engine need it not

    display(_Stored(text, data))


def _format(value: float) -> str:
    return ",.0f" if abs(value) >= 1000 else ".3g"


def _rounded(value: float | str) -> float | str:
    """A value as it is printed: further digits would differ from machine to machine."""
    return value if isinstance(value, str) else float(f"{value:{_format(value)}}".replace(",", ""))


def _distance(value: Any, measured: Any) -> str:
    if isinstance(value, str) or not value > 0 < measured:
        return ": right" if value == measured else ": no"
    ratio = value / measured
    if abs(ratio - 1) <= 0.05:
        return ": right"
    return f", {max(ratio, 1 / ratio):.2g} times too {'high' if ratio > 1 else 'low'}"
