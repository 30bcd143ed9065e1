"""`python -m nanovllm.lab.bench` is `nanovllm bench`."""

import sys

from nanovllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
