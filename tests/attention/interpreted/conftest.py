"""Tests of Triton kernels in Triton's interpreter, each module in a process of its own: see tests/attention/test_interpreted.py.

By hand: TRITON_INTERPRET=1 python -m pytest tests/attention/interpreted
"""

from nanovllm.ops.support import is_interpreted

# A wild load of an interpreted kernel takes the whole process along, so the ordinary run must not collect them.
collect_ignore_glob = [] if is_interpreted() else ["test_*.py"]
