"""The pages say what the code does: generated ones are fresh, links lead somewhere, every command is accounted for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headrace.cli.serve import service_settings
from headrace.dev import pages
from headrace.runtime.settings import load_settings
from support.documents import PAGES, ROOT, TESTED_LANGUAGES, Block, blocks


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == pages.PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("block", [b for b in blocks() if b.language in TESTED_LANGUAGES], ids=str)
def test_every_command_and_program_says_how_it_is_tested(block: Block) -> None:
    assert block.kind in {"run", "python", "settings", "elsewhere"}, "put a mark above it; see support/documents.py"
    assert block.kind != "elsewhere" or ":" in block.mark, "say where"


@pytest.mark.parametrize("block", [b for b in blocks() if b.kind == "settings"], ids=str)
def test_a_config_file_in_the_docs_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(block.text)
    tables = tomllib.loads(block.text)
    assert tables
    for service in tables:
        load_settings(service_settings(service), service, file=file)
