"""The pages of docs/ that are made from the code: `make docs` writes them, a test fails when they are stale.

docs/configuration.md    every setting of every service, from their declarations
docs/errors.md           every failure, from the table that the services use
"""

from __future__ import annotations

from pathlib import Path

from headrace.cli.serve import setting_rows
from headrace.control.errors import RULES

DOCS = Path(__file__).resolve().parents[3] / "docs"
SERVICES = ("router", "scheduler", "registry")
_MADE = "<!-- Made by `make docs`; edit the code, not this page. -->\n"
_EXAMPLE = """<!-- settings -->
```toml
[router]
listen = "0.0.0.0:50051"
etcd = ["etcd-0:2379", "etcd-1:2379", "etcd-2:2379"]
```
"""


def configuration() -> str:
    """docs/configuration.md."""
    parts = [
        "# Configuration\n",
        _MADE,
        "Each service reads its settings from, in rising order of precedence: the defaults below, its table in a TOML "
        "file (`--config FILE`), environment variables, and options on the command line (`--drain-grace-s 5`). One "
        "file may hold the tables of all services. A wrong value or an unknown name stops the start with one sentence "
        "that says which setting, where it came from, and what is wrong.\n",
        _EXAMPLE,
        "Secrets are given as files, never as values. In an environment variable a list is separated by commas.\n",
        "Client commands (`headrace status`, `generate`, `model`) use `HEADRACE_ROUTER`, `HEADRACE_REGISTRY` "
        "(host:port) and `HEADRACE_MODEL`; without them they find what `headrace up` started on this machine.\n",
    ]  # fmt: skip
    for service in SERVICES:
        rows = [
            f"| `{field}` | `{env}` | {_code(default)} | {_cell(text)} |"
            for field, env, default, text in setting_rows(service)
        ]
        parts.append(
            f"## `[{service}]`\n\n| setting | environment | default | meaning |\n| --- | --- | --- | --- |\n"
            + "\n".join(rows)
            + "\n"
        )
    return "\n".join(parts)


def errors() -> str:
    """docs/errors.md."""
    rows = [
        f"| `{reason.value}` | `{rule.code}` | {rule.blame.value} | {_cell(rule.retry.value)} "
        f"| {_delay(rule.retry_after_s)} | {_cell(rule.advice)} |"
        for reason, rule in RULES.items()
    ]
    return "\n".join(
        [
            "# Errors\n",
            _MADE,
            "Every failure has a stable name. On the wire it is a gRPC status with `google.rpc.ErrorInfo` in its "
            "details (`reason` as below, `domain` \"headrace\"); where a field of the request is at fault, "
            "`google.rpc.BadRequest` names it; where waiting helps, `google.rpc.RetryInfo` and the trailer "
            "`grpc-retry-pushback-ms` say how long; a trailer of -1 says that the same call must not be made again. "
            "`google.rpc.QuotaFailure` names a tenant's limit that is used up. A failure after the first event is "
            "also in the terminal event, and the status of the call agrees with it.\n",
            "| reason | status | at fault | who may try again | after | what to do |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )  # fmt: skip


PAGES = {"configuration.md": configuration, "errors.md": errors}


def main() -> None:
    """Write the pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(default: str) -> str:
    return default if default in {"unset", "required", "computed", "this host's name"} else f"`{default}`"


def _delay(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "at once" if seconds == 0 else f"{seconds:g} s"


if __name__ == "__main__":
    main()
