"""Command line: parse, call, render."""

import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from capplan import __version__
from capplan.cli.output import write
from capplan.errors import CapplanError, ExitStatus, InputError, did_you_mean

# Command → module and function. Only the command that is run is imported and built.
COMMANDS: Final = {
    "vram": ("vram", "vram"),
    "latency": ("latency", "latency"),
    "simulate": ("simulate", "simulate"),
    "profile": ("profile", "profile"),
    "cost": ("cost", "cost"),
    "prices": ("prices", "prices"),
    "list": ("show", "list_things"),
    "show": ("show", "show"),
    "explain": ("explain", "explain"),
    "doctor": ("doctor", "doctor"),
    "compare": ("doctor", "compare"),
    "calibrate": ("calibrate", "calibrate"),
    "check": ("check", "check"),
    "diff": ("diff", "diff"),
    "init": ("init", "init"),
    "schema": ("schema", "schema"),
}
# The parser's own error class, wherever this Typer keeps its parser: the parent of BadParameter.
USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]


def application(*names: str) -> typer.Typer:
    """The Typer app with these commands, or with all of them."""
    app = typer.Typer(
        name="capplan",
        help="GPU capacity planning and cost of LLM serving, on numbers that say where they come from.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names or COMMANDS:
        module, function = COMMANDS[name]
        app.command(name=name)(getattr(import_module(f"capplan.cli.{module}"), function))
    return app


def _options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """GPU capacity planning and cost of LLM serving, on numbers that say where they come from."""


def main() -> None:
    """Entry point of the `capplan` command: every known error becomes three lines and its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    if arguments == ["--version"]:
        write(f"capplan {__version__}\n")
        return int(ExitStatus.OK)
    asked = arguments[:1] if arguments and arguments[0] in COMMANDS else []
    try:
        result = application(*asked)(args=arguments or ["--help"], prog_name="capplan", standalone_mode=False)
    except CapplanError as error:
        print(error, file=sys.stderr)
        return int(error.exit_status)
    except USAGE_ERROR as error:
        print(_usage_error(error), file=sys.stderr)
        return int(ExitStatus.INPUT)
    except typer.Exit as error:
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is wrong, and nothing more can be written.
        sys.stderr.close()
        return int(ExitStatus.OK)
    return int(result) if isinstance(result, int) else int(ExitStatus.OK)


def _usage_error(error: Any) -> InputError:
    """A parser's complaint in the three-line form, with the nearest known option or command."""
    context = error.ctx
    command = context.command_path if context is not None else "capplan"
    hint = f"`{command} --help` shows the options"
    name = getattr(error, "option_name", None)
    known = []
    if context is not None:
        known = [option for param in context.command.params for option in param.opts]
        known += list(getattr(context.command, "commands", {}))
    message = error.format_message().rstrip(".")
    if name is None and message.startswith("No such command"):
        name = message.split("'")[1]
        # An older version on the path is the usual reason: say which one answers.
        message = f"{message.split('. ')[0]} in capplan {__version__}"
    if "valid integer" in message or "valid number" in message:
        hint = "write a plain number: 1000, not 1e3 or 1k"
    if name is not None:
        hint = did_you_mean(name, known, hint)
    return InputError(message, where=command, hint=hint)
