"""Lectures as web pages, which need no kernel: nbconvert's, with unchanged lines paler, players,
predictions that lock, with their answers folded, and controls for animations."""

import base64
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import DictLoader
from nbconvert import HTMLExporter
from nbconvert.filters import Highlight2HTML

from nanovllm.lab.course.copies import FOLDER
from nanovllm.lab.course.unchanged import unchanged_lines
from nanovllm.lab.site.players import enliven, lectures_module

FOLDED = "Code that imports, sets up, draws, measures or checks"
ANSWER = "Answer: the output"

_PALE = '<span class="unchanged">'
_CODE = re.compile(r"(?<=<pre><span></span>).*?(?=\n</pre>)", re.DOTALL)
_GIF = re.compile(r'(?<=src=")[^":]+\.gif(?=")')
_PAGE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_css -%}
{{ super() }}
<style>.unchanged { opacity: .45 }</style>
<script type="module">
{% raw %}MODULE{% endraw %}
</script>
{%- endblock html_head_css -%}
{%- block input -%}
{%- if cell.metadata.get('jupyter', {}).get('source_hidden') -%}
<details><summary>FOLDED</summary>
{{ super() }}
</details>
{%- else -%}
{{ super() }}
{%- endif -%}
{%- endblock input -%}
{%- block outputs -%}
{%- if cell.metadata.get('jupyter', {}).get('outputs_hidden') -%}
<details class="jp-Cell-outputWrapper"><summary>ANSWER</summary>
{{ super() }}
</details>
{%- else -%}
{{ super() }}
{%- endif -%}
{%- endblock outputs -%}
"""


class PaleLines(Highlight2HTML):
    """Highlights code as nbconvert does, and shows unchanged lines paler."""

    def __call__(
        self, source: str, language: str | None = None, metadata: dict[str, Any] | None = None
    ) -> str:
        """The code of a cell as HTML."""
        highlighted = super().__call__(source, language, metadata)
        return show_paler(highlighted, unchanged_lines(metadata or {}))


def show_paler(highlighted: str, unchanged: Collection[int]) -> str:
    """Mark lines of a cell, counted from 1, in the HTML that pygments has made of it."""

    def pale(code: re.Match[str]) -> str:
        lines = code[0].split("\n")  # pygments closes its spans at the end of each line
        return "\n".join(
            f"{_PALE}{line}</span>" if number in unchanged else line
            for number, line in enumerate(lines, start=1)
        )

    return _CODE.sub(pale, highlighted)


def write_page(path: Path, root: Path) -> Path:
    """Write a lecture as a page into the folder of copies, where its links lead to the same
    places; returns the page's path."""
    template = _PAGE.replace("FOLDED", FOLDED).replace("ANSWER", ANSWER)
    template = template.replace("MODULE", lectures_module())
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"lecture.html.j2": template})],
        template_file="lecture.html.j2",
        filters={"highlight_code": PaleLines(pygments_lexer="ipython3")},
    )
    notebook = nbformat.read(path, as_version=4)
    enliven(notebook["cells"])
    resources = {"metadata": {"name": path.stem}}
    page, _ = exporter.from_notebook_node(nbformat.from_dict(notebook), resources)

    def embedded(name: re.Match[str]) -> str:
        """An animation in the page itself: a script of a local page may read no other file."""
        data = base64.b64encode((path.parent / name[0]).read_bytes()).decode()
        return f"data:image/gif;base64,{data}"

    page = _GIF.sub(embedded, page)
    target = root / FOLDER / f"{path.stem}.html"
    target.parent.mkdir(exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target
