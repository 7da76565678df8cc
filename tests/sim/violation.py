"""What is raised where a law does not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """A law is broken."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
