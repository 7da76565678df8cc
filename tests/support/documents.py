"""The fenced blocks of README.md and docs/, and the mark above each that says how it is tested.

<!-- run -->                         run by bash against the session's stack, must succeed
<!-- run; expect: REGEX -->          and its output must match
<!-- run; fails; expect: REGEX -->   must fail
<!-- python; expect: REGEX -->       the same, run by Python
<!-- settings -->                    a config file: every table must load
<!-- elsewhere: WHY -->              not run here
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTED_LANGUAGES = {"sh", "bash", "console", "python", "toml"}

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def kind(self) -> str:
        """First word of the mark: run, python, settings or elsewhere."""
        return re.split(r"[;:]", self.mark)[0].strip()

    @property
    def expected(self) -> str:
        """The regular expression that the output must match, or ""."""
        found = re.search(r"expect: (.*)$", self.mark)
        return found[1] if found else ""

    @property
    def fails(self) -> bool:
        """Whether it must fail."""
        return "; fails" in self.mark

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> list[Block]:
    """All blocks of all pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match["language"], match["mark"] or "", match["text"]))
    return found
