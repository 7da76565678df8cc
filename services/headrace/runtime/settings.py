"""Settings of a service: defaults, then a TOML file, then the environment, then the command line.

A wrong setting stops the start with one sentence that names it, where it came from, and the line of the
file. Each service declares a subclass of Settings; `--help` and docs/configuration.md are made from it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic

ENV_PREFIX = "HEADRACE_"


class SettingsError(Exception):
    """A setting is wrong; the message is the one sentence for the operator."""


class Settings(pydantic.BaseModel):
    """Base of a service's settings. Every field has a description; unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


S = TypeVar("S", bound=Settings)


def env_name(service: str, field: str) -> str:
    """Environment variable that overrides `field` of `service`: ("router", "listen") -> HEADRACE_ROUTER_LISTEN."""
    return f"{ENV_PREFIX}{service.upper()}_{field.upper()}"


def load_settings(
    cls: type[S],
    service: str,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> S:
    """Read the settings of one service.

    Args:
        cls: the service's settings.
        service: table of the TOML file ([router]) and middle part of the environment names.
        file: TOML file; None means no file.
        environ: the environment; values are parsed as TOML where the field is not a string.
        overrides: values from the command line; None values are ignored.

    Raises:
        SettingsError: naming the setting, the source and, for a file, the line.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        _from_file(values, sources, file, service)
    for field, info in cls.model_fields.items():
        name = env_name(service, field)
        if environ and name in environ:
            values[field] = _parse_env(environ[name], info.annotation)
            sources[field] = f"environment variable {name}"
    for field, value in (overrides or {}).items():
        if value is not None:
            values[field] = value
            sources[field] = f"option --{field.replace('_', '-')}"
    try:
        return cls.model_validate(values)
    except pydantic.ValidationError as error:
        raise SettingsError(_sentence(cls, service, error, sources)) from None


def describe_settings(cls: type[Settings], service: str) -> list[tuple[str, str, str, str]]:
    """Rows of (setting, environment variable, default, meaning) for --help and the docs."""
    rows = []
    for field, info in cls.model_fields.items():
        default = "required" if info.is_required() else _show(info.get_default(call_default_factory=True))
        rows.append((field, env_name(service, field), default, info.description or ""))
    return rows


def _from_file(values: dict[str, Any], sources: dict[str, str], file: Path, service: str) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read the config file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"the config file {file} is not UTF-8 text") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"the config file {file} is not valid TOML: {error}") from None
    table = document.get(service, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{file}: [{service}] must be a table of settings")
    for key, value in table.items():
        values[key] = value
        sources[key] = f"{file}, line {_line_of(text, service, key)}"


def _line_of(text: str, table: str, key: str) -> int:
    """Line of `key` below `[table]`, from 1; the table's own line, or 1, when it cannot be told."""
    current, found = "", 1
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[]").split(".")[0].strip()
            if current == table:
                found = number
                if stripped.strip("[]") == f"{table}.{key}":
                    return number
        elif current == table and stripped.split("=")[0].strip().strip('"') == key:
            return number
    return found


def _parse_env(text: str, annotation: Any) -> Any:
    if annotation in (str, Path) or "str" in str(annotation).split("[")[0]:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(cls: type[Settings], service: str, error: pydantic.ValidationError, sources: Mapping[str, str]) -> str:
    problem = error.errors(include_url=False)[0]
    location = ".".join(str(part) for part in problem["loc"])
    field = str(problem["loc"][0]) if problem["loc"] else service
    source = sources.get(field, "")
    if problem["type"] == "extra_forbidden":
        known = ", ".join(cls.model_fields)
        what = f"no such setting; {service} has: {known}"
    elif problem["type"] == "missing":
        what = f"must be set (in [{service}] of the config file, or as {env_name(service, field)})"
    else:
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        what = f"{message[0].lower()}{message[1:]}, got {problem['input']!r}"
    return f"{service} setting {location!r}{f' ({source})' if source else ''}: {what}"


def _show(value: Any) -> str:
    if value is None or value == "":
        return "unset"
    return str(value)
