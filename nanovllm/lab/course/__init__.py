"""What turns lectures into modules of the engine, and helps them teach.

Lectures import from here; the engine never does. The command line is
``python -m nanovllm.lab.course --help``."""

from nanovllm.lab.course.exercise import Exercise
from nanovllm.lab.course.predict import Prediction as predict
from nanovllm.lab.course.reopen import extend

__all__ = ["Exercise", "extend", "predict"]
