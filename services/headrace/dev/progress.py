"""Progress of a long setup: one line a phase, with its time. Standard library only."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from typing import Iterator  # noqa: UP035  read by interpreters that are about to be refused


class Progress:
    """One line a phase, with its time; on a terminal the current line is kept up to date."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.live = sys.stderr.isatty()
        self.quiet = quiet
        self.note = ""
        self._said = ""

    @contextlib.contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Show `title` while the block runs, and its time when it ends."""
        start, self.note, self._said = time.monotonic(), "", ""
        ended = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(title, start, ended), daemon=True)
        if not self.live and not self.quiet:
            self._line(f"{title} ...")
        ticker.start()
        try:
            yield
        except BaseException:
            ended.set()
            ticker.join()
            self._line(f"{title}: stopped after {_took(start)}")
            raise
        ended.set()
        ticker.join()
        if not self.quiet:
            self._line(f"{title}: done in {_took(start)}")

    def _tick(self, title: str, start: float, ended: threading.Event) -> None:
        while not ended.wait(0.25 if self.live else 15.0):
            if self.quiet:
                continue
            if self.live:
                mark = "|/-\\"[int(time.monotonic() * 4) % 4]
                width = shutil.get_terminal_size().columns - 1
                text = f"  {mark} {title}  {_took(start)}  {self.note}"
                sys.stderr.write(f"\r\x1b[K{text[:width]}")
                sys.stderr.flush()
            elif self.note != self._said:
                self._said = self.note
                self._line(f"  {_took(start)}  {self.note}")

    def _line(self, text: str) -> None:
        sys.stderr.write(f"{chr(13)}{chr(27)}[K  {text}\n" if self.live else f"  {text}\n")
        sys.stderr.flush()


def _took(start: float) -> str:
    seconds = int(time.monotonic() - start)
    return f"{seconds // 60}:{seconds % 60:02d}"
