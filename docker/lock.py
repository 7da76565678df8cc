"""Write docker/requirements/*.txt: every package of an image with its exact version, as tested in this environment.

    python docker/lock.py            # after `make setup-dev`, when pyproject.toml has changed

A file holds the whole closure of what pyproject.toml asks for, read from what is installed here, so what `make test`
ran with is what an image gets. `docker/requirements/build.txt` (the build backend) is written by hand.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docker" / "requirements"
FILES = {"router": (), "scheduler": (), "worker-cpu": ("worker-cpu", "signing"), "worker-gpu": ("signing",)}
"""Extras of pyproject.toml, by file."""
LEFT_OUT = {"router": frozenset({"tritonclient"})}
"""What a service never imports (tests/docker proves it): with numpy it would be a third of the image."""
HEADER = "# Made by docker/lock.py; change pyproject.toml, `make setup-dev`, and run it again.\n"
BUILT_HERE = frozenset({"llama-cpp-python"})
"""Not taken from the index as a wheel: docker/Dockerfile builds it for its own CPUs."""
ENVIRONMENT = {"python_version": "3.11", "python_full_version": "3.11.2", "sys_platform": "linux"}
"""Of the images: Debian 12's Python."""


def requirements(extras: Iterable[str]) -> list[Requirement]:
    """What pyproject.toml asks for, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def closure(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Version by name of these and all that they need, as installed.

    Raises:
        PackageNotFoundError: one is not installed.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, "") for requirement in wanted]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({**ENVIRONMENT, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version
        for part in {"", *requirement.extras}:
            if (name, part) not in seen:
                seen.add((name, part))
                todo += [(Requirement(line), part) for line in distribution.requires or ()]
    return found


def text(name: str) -> str:
    """The content of a file."""
    versions = closure(r for r in requirements(FILES[name]) if r.name not in LEFT_OUT.get(name, ()))
    return HEADER + "".join(
        f"{package}=={versions[package]}\n" for package in sorted(versions) if package not in BUILT_HERE
    )


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        (FOLDER / f"{name}.txt").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
