"""`python -m nanovllm.bench` is `nanovllm bench`."""

import sys

from nanovllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
