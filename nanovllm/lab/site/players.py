"""Players on pages that no kernel stands behind: on the site, and in exported lectures."""

from pathlib import Path

from nanovllm.lab.viz.player import bundle

WEB = Path(__file__).parent / "web"


def players_module() -> str:
    """The JavaScript module of such pages in one file, with the player and its style sheet. It
    exports `mountPlayer` and `mountStored`."""
    return bundle(WEB / "players.js") + "\nexport { mountPlayer, mountStored };\n"
