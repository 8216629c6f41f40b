"""write_cli_docs.py [--check]: docs/cli.md from the commands themselves; --check only says whether it is in step."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer
from enginecore.cli.common import engine_settings
from enginecore.cli.main import app

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEAD = """# Command line

Written from the commands' own help by `make docs`; a test keeps it in step. Every failure is one line that says what is
wrong and, where there is something to type, one that says what; `--debug` adds the traceback.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure |
| 2 | wrong usage, or an option that is refused |
| 3 | a device plugin is broken |
| 4 | more than one device fits |
| 5 | the device or its driver is missing |
| 6 | the installed torch was built for another device |
| 7 | the plugin was built for another version of the contract |
| 8 | the device cannot run this model or feature |
| 9 | `run-batch`: finished, but not every request has succeeded |
| 130 | interrupted |
"""


ENGINE = """## The engine's options

What `serve`, `generate`, `chat` and `bench` have in common.
"""


def cli_docs() -> str:
    """The whole page."""
    parts = [HEAD]
    _document(typer.main.get_command(app), "enginecore", parts)
    return "\n".join(parts)


def _document(command: Any, path: str, parts: list[str]) -> None:
    """Append the command and those below it; the shared options once, before the first command that has them."""
    children = getattr(command, "commands", {})
    shared, own = _split([p for p in command.params if p.name != "help"])
    if shared and ENGINE not in parts:
        parts += [ENGINE, *_tables(shared)]
    model = any(p.name == "model" and p.param_type_name == "argument" for p in shared)
    parts.append(f"## `{path}{' [MODEL]' if model else ''}{' COMMAND' if children else ''}`\n")
    parts.append(inspect.cleandoc(command.help or "") + "\n")
    if shared:
        parts.append("Takes [the engine's options](#the-engines-options) too.\n")
    parts += _tables(own)
    for name, child in children.items():
        _document(child, f"{path} {name}", parts)


def _split(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    """(the engine's options, the command's own); none are the engine's when not all are there."""
    names = set(inspect.signature(engine_settings).parameters)
    if not names <= {parameter.name for parameter in parameters}:
        return [], parameters
    return [p for p in parameters if p.name in names], [p for p in parameters if p.name not in names]


def _tables(parameters: list[Any]) -> list[str]:
    panels: dict[str, list[str]] = {}
    for parameter in parameters:
        panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(_row(parameter))
    return [f"| {panel} | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n" for panel, rows in panels.items()]


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{(parameter.metavar or parameter.name).upper()}`"
    else:
        name = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
        if not parameter.is_flag:
            name += f" {parameter.metavar or _placeholder(parameter.default)}".replace("|", "\\|")
    default = "" if parameter.default in (None, [], ()) else str(parameter.default)
    if getattr(parameter, "is_flag", False):
        default = "on" if parameter.default else "off"
    return f"| {name} | {default} | {(parameter.help or '').replace('|', chr(92) + '|')} |"


def _placeholder(default: Any) -> str:
    return "NUMBER" if isinstance(default, (int, float)) else "TEXT"


def main() -> int:
    text = cli_docs()
    if "--check" in sys.argv[1:]:
        in_step = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name} is {'in step' if in_step else 'out of step: run make docs'}")
        return 0 if in_step else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
