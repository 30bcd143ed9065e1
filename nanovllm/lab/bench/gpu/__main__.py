"""One part of the GPU check in a process of its own: `python -m nanovllm.lab.bench.gpu PART [WORD ...]`.

Rows go to standard output, one JSON object a line, as soon as they are known, so that nothing is lost when the
process is ended; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os

from nanovllm.lab.bench.gpu.setting import Setting, Skip

PARTS = {
    "machine": "timing",
    "kernels": "checks",
    "sanitizer": "checks",
    "tokens": "tokens",
    "decode": "attention",
    "latent": "latent",
    "nccl": "nccl",
    "prefill": "attention",
    "engine": "end_to_end",
    "transformers": "hugging_face",
}


def main() -> None:
    """Run the part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    # The rows get standard output for themselves.
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    setting = Setting(arguments.dry_run, arguments.seconds)
    module = importlib.import_module(f"nanovllm.lab.bench.gpu.{PARTS[arguments.part]}")
    try:
        for row in getattr(module, arguments.part)(setting, *arguments.words):
            print(json.dumps(row, allow_nan=False), file=rows)
    except Skip as reason:
        print(json.dumps({"table": "skipped", "reason": str(reason)}), file=rows)


if __name__ == "__main__":
    main()
