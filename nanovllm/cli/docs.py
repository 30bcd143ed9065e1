"""`nanovllm docs`: open the course as web pages, which `make site` has built."""

import argparse
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nanovllm
from nanovllm.data.errors import UsageError

SITE = Path(nanovllm.__file__).parents[1] / "_site"
MOST = 65535  # the highest port


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing about it."""

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("page", nargs="?", default="", help="the page to open, as labs/blocks.html")
    parser.add_argument("--site", type=Path, default=SITE, help="the folder of the pages")
    parser.add_argument("--port", type=int, default=0, help="by default any that is free")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(arguments: argparse.Namespace) -> None:
    """Serve the pages to this machine until a signal comes: browsers let scripts of files read no
    other files.

    Raises:
        UsageError: there is no site yet, no such page or port, or another program listens on the
            port.
    """
    if not (arguments.site / "index.html").is_file():
        raise UsageError(f"there is no site in {arguments.site}: `make site` builds it")
    if arguments.page and not (arguments.site / arguments.page).is_file():
        raise UsageError(
            f"{arguments.site} has no page {arguments.page}: `make site` builds it again"
        )
    pages = partial(Quiet, directory=str(arguments.site))
    if not 0 <= arguments.port <= MOST:
        raise UsageError(f"--port must be 0 (any that is free) to {MOST}, got {arguments.port}")
    try:
        server = ThreadingHTTPServer(("127.0.0.1", arguments.port), pages)
    except OSError as error:
        raise UsageError(f"port {arguments.port}: {error.strerror}: choose another one") from error
    with server:
        url = f"http://127.0.0.1:{server.server_port}/{arguments.page}"
        print(f"The course is at {url} (Ctrl-C ends this)", flush=True)
        if not arguments.no_browser:
            webbrowser.open(url)
        server.serve_forever()
