"""Reads the stream of a server's steps, as the live page does, and throws it away: `python watcher.py URL`.

Each line of its input is a number of seconds; the answer is the number of lines that it read: the header, and one per step.
"""

from __future__ import annotations

import sys
import time
import urllib.request


def watch(url: str, seconds: float) -> int:
    """Read for so long, or until the server ends; returns the number of lines."""
    count, end = 0, time.monotonic() + seconds
    with urllib.request.urlopen(url) as stream:
        while time.monotonic() < end and (chunk := stream.read1(2**20)):
            count += chunk.count(b"\n")
    return count


if __name__ == "__main__":
    for order in sys.stdin:
        print(watch(sys.argv[1], float(order)), flush=True)
