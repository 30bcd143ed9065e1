"""The command `python -m tests.english`; the package's docstring describes it."""

from __future__ import annotations

import argparse
import pathlib
import sys

from tests import english


def check() -> int:
    """Report counts above the stored ones."""
    found, stored = english.all_hits(), english.stored_counts()
    complaints = english.complaints(found, stored)
    for line in complaints:
        print(line)
    if complaints:
        return 1
    if fewer := stored.total() - len(found):
        print(
            f"English: {fewer} fewer than stored; `python -m tests.english --store` lowers the "
            "stored counts"
        )
    return 0


def store() -> int:
    """Lower the stored counts to the present ones."""
    now, stored = english.count(english.all_hits()), english.stored_counts()
    english.write_counts(now & stored)
    print(f"stored {(now & stored).total()}, before {stored.total()}")
    return 0


def totals() -> int:
    """Print the count of each phrase, most frequent first."""
    for (kind, pattern), number in english.count(english.all_hits()).most_common():
        print(f"{number:5d}  {kind:9s} {pattern}")
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m tests.english", description=english.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="exit with 1 if a count exceeds the stored one"
    )
    mode.add_argument(
        "--store", action="store_true", help="lower the stored counts to the present ones"
    )
    options = parser.parse_args()
    if options.check:
        return check()
    if options.store:
        return store()
    for path in options.files:
        for hit in english.hits(path.resolve()):
            print(hit)
    return 0 if options.files else totals()


if __name__ == "__main__":
    sys.exit(main())
