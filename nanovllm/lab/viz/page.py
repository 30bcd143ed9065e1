"""Takes figures/page.png, a server's page in mid-burst, while `make demo` runs:
`python -m nanovllm.lab.viz.page [URL]`."""

import io
import pathlib
import sys

from PIL import Image

from nanovllm.lab.viz.film import chromium

PATIENCE = {"timeout": 120_000}  # milliseconds


def photograph(url: str) -> bytes:
    """The page as a PNG file of few colours: a chat has been answered, and the pool is so full that
    a request was preempted."""
    from playwright.sync_api import expect

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(url)
        page.get_by_role("button", name="What is the capital of Japan?").click()
        expect(page.locator("[data-fact=reason]")).to_be_visible(**PATIENCE)
        expect(page.locator("[data-figure=preempted] b")).not_to_have_text("0", **PATIENCE)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    buffer = io.BytesIO()
    picture.quantize(96, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    url = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/"
    pathlib.Path("figures/page.png").write_bytes(photograph(url))
