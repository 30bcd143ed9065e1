"""Builds the site: `python -m nanovllm.lab.site`."""

import argparse
import sys
from pathlib import Path

import nanovllm
from nanovllm.lab.site.labs.archive import ArchiveError
from nanovllm.lab.site.labs.packages import BuildError

SITE = Path(nanovllm.__file__).parents[1] / "_site"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m nanovllm.lab.site", description=__doc__)
    parser.add_argument("--out", type=Path, default=SITE, help="by default _site/")
    out = parser.parse_args().out.resolve()
    try:
        # The extra `site`, which may be missing.
        from nanovllm.lab.site.build import build
        from nanovllm.lab.site.weights import table
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "nanovllm":
            raise
        remedy = "`make site` installs what is missing, or pip install -e '.[site]'"
        print(f"error: the site needs the package {missing}: {remedy}", file=sys.stderr)
        return 1
    print(f"Writing the pages to {out}: a minute or two", flush=True)
    try:
        build(out)
    except (ArchiveError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{table(out)}\nThe site is in {out}; `nanovllm docs` (in .venv/bin) opens it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
