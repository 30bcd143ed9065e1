"""What turns lectures into modules of the engine, and helps them teach.

Lectures import from here; the engine never does. The command line is ``python -m nanovllm.course --help``.
"""

from nanovllm.course.exercise import Exercise, check
from nanovllm.course.reopen import extend

__all__ = ["Exercise", "check", "extend"]
