"""Builds the site: `python -m nanovllm.lab.site`."""

import argparse
import sys
from pathlib import Path

from nanovllm.lab.site.build import build
from nanovllm.lab.site.labs.archive import ArchiveError
from nanovllm.lab.site.labs.packages import BuildError
from nanovllm.lab.site.sources import ROOT
from nanovllm.lab.site.weights import table


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m nanovllm.lab.site", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "_site", help="by default _site/")
    out = parser.parse_args().out.resolve()
    try:
        build(out)
    except (ArchiveError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(out))
    print(f"The site is in {out}; `nanovllm docs` opens it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
