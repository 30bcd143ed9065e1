"""Runs one part of a benchmark in this process: `python -m nanovllm.lab.bench` (see `parts.Runner`,
which starts it).

Standard input has the order as JSON. Each row goes to standard output as a line of JSON as soon as
it is known, so that it survives if the process is killed; everything else goes to standard error.
"""

import importlib
import json
import os
import sys

from nanovllm.lab.bench.parts import Setting, Skip


def main() -> None:
    """Read the order, run the part and write its rows."""
    order = json.load(sys.stdin)
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    module, _, name = order["function"].partition(":")
    part = getattr(importlib.import_module(module), name)
    try:
        for row in part(Setting(**order["setting"]), *order["arguments"]):
            print(json.dumps(row, allow_nan=False), file=rows)
    except Skip as reason:
        print(json.dumps({"skipped": str(reason)}), file=rows)


if __name__ == "__main__":
    main()
