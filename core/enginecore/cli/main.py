"""The `enginecore` command. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from enginecore._version import __version__
from enginecore.cli import bench, plugin
from enginecore.cli.chat import chat
from enginecore.cli.common import Debug, Session, print_error, show_failure
from enginecore.cli.conformance import conformance
from enginecore.cli.devices import devices
from enginecore.cli.doctor import doctor
from enginecore.cli.generate import generate
from enginecore.cli.plan import plan
from enginecore.cli.run_batch import run_batch
from enginecore.cli.serve import serve
from enginecore.errors import EngineCoreError

app = typer.Typer(
    name="enginecore",
    help="Serve and run language models on any accelerator. 'enginecore COMMAND --help' explains a command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(generate)
app.command()(run_batch)
app.command()(chat)
app.add_typer(bench.app, name="bench")
app.command()(devices)
app.command()(doctor)
app.command()(plan)
app.command()(conformance)
app.add_typer(plugin.app, name="plugin")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"enginecore {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    """Options that stand before the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 success, 1 failure, 2 wrong usage or option, 3 to 8 device failures (see `enginecore.errors`), 9 a batch of which
    some requests failed, 130 interrupted.
    A failure is one line that says what is wrong and one that says what to do; --debug adds the traceback.
    """
    session = Session()
    try:
        code = app(args=arguments, prog_name="enginecore", standalone_mode=False, obj=session)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        sys.stdout = None  # whoever read it has gone; nothing may be flushed there at exit
        return 1
    except EngineCoreError as error:
        _trace(session)
        return show_failure(error)
    except OSError as error:
        _trace(session)
        print_error(str(error) if error.filename is None else f"{error.filename}: {error.strerror}")
        return 1
    except Exception as error:
        if _is_usage_error(error):
            return _show_usage_error(error)
        _trace(session)
        fix = None if session.debug else "run it again with --debug and report the traceback"
        print_error(f"unexpected {type(error).__name__}: {error}", fix)
        return 1


def _trace(session: Session) -> None:
    if session.debug:
        traceback.print_exc()


def _is_usage_error(error: Exception) -> bool:
    """Whether typer's parser raised it. Asked this way because some of its releases carry the parser inside and others
    depend on one."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _show_usage_error(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if not error.format_message():  # help was shown because nothing was given
        return int(error.exit_code)
    print_error(error.format_message(), f"{context.command_path} --help" if context is not None else None)
    return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
