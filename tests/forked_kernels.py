"""A plugin of pytest for the run of the lectures: their kernels are forked from a process that has
imported torch."""

import sys

import jupyter_client.launcher

from tests import forking

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type] # see tests/conftest.py
forking.threads = {}
forking.libraries += [
    "IPython",
    "ipykernel.kernelapp",
    "PIL.Image",
    "contourpy",
    "dateutil.parser",
    "kiwisolver",
    "pyparsing",
]
jupyter_client.launcher.Popen = forking.Popen  # type: ignore[misc]
