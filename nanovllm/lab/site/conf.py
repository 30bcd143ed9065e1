"""Sphinx's settings for the site. Sphinx runs on the folder that `build.stage` fills."""

import os

PARTS = ("landing", "pages", "players", "search", "sources")
project = "nanovllm"
author = project
language = "en"
html_title = project
root_doc = "contents"
extensions = [
    "myst_nb",
    "nanovllm.lab.site.pages",
    "nanovllm.lab.site.sources",
    "nanovllm.lab.site.players",
    "nanovllm.lab.site.landing",
    "nanovllm.lab.site.search",
    "nanovllm.lab.site.labs.links",
]

nb_execution_mode = "off"  # the lectures' saved outputs
nb_merge_streams = True
nb_render_markdown_format = "myst"  # as the text: outputs have tables, too
nb_mime_priority_overrides = [("html", "text/markdown", 8)]
nb_ipywidgets_js: dict[str, object] = {}  # else from another host
suppress_warnings = ["mystnb.unknown_mime_type"]  # widgets, which also have a picture
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 6
myst_dmath_double_inline = True

# MathJax 3: version 4 fetches its fonts. Its menu and its speech would fetch further files.
mathjax_path = "mathjax/tex-chtml.js"
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "sphinx_book_theme"
html_theme_options = {
    "search_bar_text": "Search the lectures, the glossary and the READMEs",
    "show_toc_level": 2,
    "article_header_start": ["toggle-primary-sidebar.html", "home.html"],
    "use_download_button": False,
    "footer_content_items": "",
}
html_baseurl = os.environ.get("SITE_URL", "")
html_context = {"default_mode": "auto"}
html_copy_source = False
html_use_index = False
html_additional_pages = {"index": "landing.html", "search": "search.html"}
html_static_path = ["web/site.css", "web/landing.css", "web/site.js", "web/search.js"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"type": "module"})]
templates_path = ["templates"]
