"""Settings: where they come from, which wins, and how a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from headrace.runtime.settings import Settings, SettingsError, describe_settings, load_settings


class Example(Settings):
    listen: str = pydantic.Field("127.0.0.1:1", description="Where.")
    count: int = pydantic.Field(3, ge=1, description="How many.")
    names: list[str] = pydantic.Field(default=["a"], description="Who.")
    secret: str = pydantic.Field(description="Must be there.", default="x")


class Strict(Settings):
    needed: int = pydantic.Field(description="Has no default.")


def load(tmp_path: Path, text: str | None = None, **arguments: Any) -> Example:
    file = None
    if text is not None:
        file = tmp_path / "headrace.toml"
        file.write_text(text)
    return load_settings(Example, "example", file=file, **arguments)


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    text = '[example]\nlisten = "file:1"\ncount = 5\n[other]\ncount = 9\n'
    environ = {"HEADRACE_EXAMPLE_COUNT": "6", "HEADRACE_EXAMPLE_NAMES": '["b", "c"]'}
    assert load(tmp_path) == Example()
    assert load(tmp_path, text).count == 5
    assert load(tmp_path, text, environ=environ).count == 6
    whole = load(tmp_path, text, environ=environ, overrides={"count": 7, "listen": None})
    assert (whole.listen, whole.count, list(whole.names)) == ("file:1", 7, ["b", "c"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[example]\n\ncount = 0\n", ["'count'", "line 3", "got 0"]),
        ("[example]\ncount = 'many'\n", ["'count'", "line 2", "'many'"]),
        ("[example]\nlisten = 'a:1'\ncuont = 1\n", ["'cuont'", "line 3", "no such setting", "count"]),
        ("[example\n", ["not valid TOML", "line 1"]),
        ("example = 3\n", ["must be a table"]),
    ],
    ids=["out of range", "wrong type", "unknown", "no TOML", "no table"],
)
def test_a_wrong_setting_is_named_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value).split("TOML:")[0]


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="HEADRACE_EXAMPLE_COUNT"):
        load(tmp_path, environ={"HEADRACE_EXAMPLE_COUNT": "-2"})


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--count"):
        load(tmp_path, overrides={"count": -2})


def test_a_missing_setting_says_how_to_set_it() -> None:
    with pytest.raises(SettingsError, match="HEADRACE_STRICT_NEEDED"):
        load_settings(Strict, "strict")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the config file"):
        load_settings(Example, "example", file=tmp_path / "none.toml")


def test_the_description_has_all_settings() -> None:
    rows = describe_settings(Example, "example")
    assert [row[0] for row in rows] == list(Example.model_fields)
    assert rows[1] == ("count", "HEADRACE_EXAMPLE_COUNT", "3", "How many.")
