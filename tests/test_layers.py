"""The layout holds: one namespace in several folders, one direction of imports, a core without I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE_ROOTS = [
    ROOT / "control_plane/headrace",
    ROOT / "services/headrace",
    ROOT / "protos/headrace",
    ROOT / "model_repo/llm/1/headrace",
]
TOP_LEVEL = {
    "protos", "services", "control_plane", "model_repo", "tests", "docker", "docs", "pyproject.toml",
    "README.md", "Makefile", "LICENSE", ".ci", ".github", ".gitignore", ".gitattributes", ".dockerignore",
}  # fmt: skip
FILE_LINES_MAX = 400


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if not generated(path)]


def generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_top_level_holds_what_the_design_names() -> None:
    assert {path.parts[0] for path in tracked()} <= TOP_LEVEL


@pytest.mark.parametrize("folder", NAMESPACE_ROOTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_namespace_root_has_no_init(folder: Path) -> None:
    assert not (folder / "__init__.py").exists(), "it would hide the other folders of the namespace"


def test_no_name_is_owned_by_two_namespace_roots() -> None:
    names = [entry.name for root in NAMESPACE_ROOTS for entry in root.iterdir() if not entry.name.startswith("__")]
    assert len(names) == len(set(names)), "one of the two would hide the other"


def test_import_contracts_hold() -> None:
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    result = subprocess.run(
        [str(lint), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", sources("control_plane"), ids=lambda path: path.stem)
def test_the_core_awaits_nothing_and_reads_no_clock(path: Path) -> None:
    """import-linter cannot see `async`, nor a clock that is reached through an allowed module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    asynchronous = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, asynchronous)]
    clocks = {"now", "utcnow", "today", "monotonic", "monotonic_ns", "perf_counter", "sleep", "urandom"}
    read = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in clocks
    ]
    assert not read
    allowed = {"__future__", "headrace"} | set(sys.stdlib_module_names)
    assert {name.split(".")[0] for name in imports(path)} <= allowed


def test_services_meet_only_in_protos_and_etcd() -> None:
    services = ("router", "scheduler", "registry")
    crossing = [
        f"{path.relative_to(ROOT)} imports {name}"
        for own in services
        for path in sources(f"services/headrace/{own}")
        for name in imports(path)
        for other in services
        if other != own and (name + ".").startswith(f"headrace.{other}.")
    ]
    assert not crossing


def test_nothing_of_the_product_imports_tests() -> None:
    importing = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in ("control_plane", "services", "model_repo")
        for path in sources(folder)
        for name in imports(path)
        if name.split(".")[0] in {"tests", "support", "pytest"}
    ]
    assert not importing


def test_nothing_is_raised_inside_except_star() -> None:
    """Before Python 3.11.4 (Debian 12 has 3.11.2) such an exception comes out wrapped in a group."""
    raised = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("services", "model_repo")
        for path in sources(folder)
        for group in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(group, ast.TryStar)
        for handler in group.handlers
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise)
    ]
    assert not raised


def test_files_stay_small_enough_to_read() -> None:
    sizes = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in tracked()
        if path.suffix == ".py" and not generated(path)
    }
    assert {path: lines for path, lines in sizes.items() if lines > FILE_LINES_MAX} == {}
