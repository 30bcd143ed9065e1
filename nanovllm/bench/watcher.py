"""Reads the stream of a server's steps, as the live page does, and throws it away: `python watcher.py URL`."""

from __future__ import annotations

import sys
import urllib.request


def watch(url: str) -> int:
    """Read until the server ends; returns the number of lines: the header, and one a step."""
    count = 0
    with urllib.request.urlopen(url) as stream:
        print("watching", flush=True)
        while chunk := stream.read1(2**20):
            count += chunk.count(b"\n")
    return count


if __name__ == "__main__":
    print(watch(sys.argv[1]))
