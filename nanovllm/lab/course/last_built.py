"""Tell which side changed since modules and lectures last agreed: the module, its lecture, or
both."""

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Below the course's root; git does not follow it.
_RECORD = Path("build", "course_modules.json")


class LastBuilt:
    """Module sources that are known to agree with the lectures: of the last build here, and of the
    last commit.

    A module whose present text is one of them was not edited since; a lecture that builds one of
    them was not either."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._texts: dict[str, str] = {}
        if (root / _RECORD).exists():
            self._texts = json.loads((root / _RECORD).read_text(encoding="utf-8"))

    def has(self, path: str, text: str) -> bool:
        """Return whether this was the text of the module, whose path is relative to the root, when
        both sides agreed."""
        return text in (self._texts.get(path), self._committed(path))

    def store(self, texts: Mapping[str, str]) -> None:
        """Note the source of each module, by path, that agrees with the lectures now."""
        self._texts |= texts
        (self._root / _RECORD).parent.mkdir(exist_ok=True)
        (self._root / _RECORD).write_text(
            json.dumps(self._texts, indent=1) + "\n", encoding="utf-8"
        )

    def advice(self, path: str, current: str, built: str) -> str:
        """Return the advice, one sentence, for a module that differs from what its lecture
        builds."""
        module_changed = not self.has(path, current)
        lecture_changed = not self.has(path, built)
        pull = (
            "`python -m nanovllm.lab.course build --pull` carries the module's edits into the "
            "lecture"
        )
        if module_changed and lecture_changed:
            return (
                f"{path}: the module and its lecture were both edited: {pull}, where they touch "
                "different lines\n"
            )
        if module_changed:
            return f"{path}: the module was edited: {pull}\n"
        return f"{path}: the lecture was edited: `make build` writes the module\n"

    def merged(self, path: str, current: str, built: str) -> str | None:
        """Return a module's source with its own edits and with those of its lecture.

        Returns:
            None if both have changed the same lines. The module as it is if it is not known what
            either of them was before.
        """
        before = self._texts.get(path) or self._committed(path)
        if before is None or self.has(path, built):
            return current
        if self.has(path, current):
            return built
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("module", "before", "lecture")]
            for file, text in zip(files, (current, before, built), strict=True):
                file.write_text(text, encoding="utf-8")
            command = ["git", "merge-file", "--stdout", *map(str, files)]
            try:
                return subprocess.run(command, capture_output=True, check=True).stdout.decode()
            except (OSError, subprocess.CalledProcessError):
                return None

    def _committed(self, path: str) -> str | None:
        """Return a module's text in the last commit; None without git, if the commit does not have
        the module, or if neither the module nor a lecture has changed since: then a difference
        between them was committed, too."""
        text = self._git(["show", f"HEAD:./{path}"])
        changed = self._git(["diff", "--name-only", "HEAD", "--", path, "notebooks"])
        return text if changed else None

    def _git(self, arguments: list[str]) -> str | None:
        """Return the output of a command; None if it fails, or there is no git."""
        command = ["git", "-C", str(self._root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, check=True).stdout.decode()
        except (OSError, subprocess.CalledProcessError):
            return None
