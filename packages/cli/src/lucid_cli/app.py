"""The groups of the `lucid` command, and the one place where errors become exit codes."""

import gc
import importlib
import io
import traceback
from collections.abc import Mapping, Sequence

import click

from lucid_cli import __version__
from lucid_cli.command import CannotStartError
from lucid_cli.output import one_line, say, warn
from lucid_profiler.errors import EnvironmentUnusableError, NotComparableError, ReportError

INTERNAL_ERROR = 1
INTERRUPTED = 130

__all__ = ["INTERRUPTED", "cli", "run"]


class _LazyGroup(click.Group):
    """A group of which some commands are imported only when they are needed.

    Args:
        modules: by command name, the module of `lucid_cli.commands` that has a click command called `command`.
        summaries: by command name, what the list of commands says of it; with them nothing is imported for the list.
    """

    def __init__(
        self, *, modules: Mapping[str, str], summaries: Mapping[str, str] | None = None, **settings: object
    ) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._modules = modules
        self._summaries = summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self._modules]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"lucid_cli.commands.{self._modules[cmd_name]}")
        gc.freeze()
        gc.enable()
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        if self._summaries is None:
            super().format_commands(ctx, formatter)
        else:
            shown = {name: click.Command(name, help=text) for name, text in self._summaries.items()}
            click.Group(commands={**self.commands, **shown}).format_commands(ctx, formatter)


@click.group(
    cls=_LazyGroup,
    modules={"doctor": "doctor"},
    summaries={"doctor": "Look for what stands in the way of a measurement, and say what to do about it."},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Measure whether a training run became faster, and whether not one bit of it changed."""


cli.add_command(
    _LazyGroup(
        name="profile",
        help="Run a training command natively and captured, in pairs of fresh processes, or follow a process.",
        modules={"run": "profile_run", "estimate": "profile_estimate", "attach": "profile_attach", "daemon": "daemon"},
    )
)
cli.add_command(
    _LazyGroup(
        name="report",
        help="Show, compare and check reports.",
        modules={
            "show": "report_show",
            "diff": "report_diff",
            "validate": "report_validate",
            "export": "report_export",
            "html": "report_html",
        },
    )
)


def run(args: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        result = cli.main(args=list(args), prog_name="lucid", standalone_mode=False)
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        shown = text.getvalue().removesuffix("\n")
        say(shown if _is_help(error) else shown.replace(error.message, one_line(error.message)))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit:
        # click ends the process itself in one case: nobody reads the help that it prints.
        return 0
    except Exception as error:  # noqa: BLE001 - what lucid does not know is shown whole, as an internal error
        exit_code = _exit_code(error)
        if exit_code is None:
            say(traceback.format_exc().removesuffix("\n"))
            return INTERNAL_ERROR
        warn(str(error) if not isinstance(error, OSError) else _os_error(error), kind="Error")
        return exit_code
    return result if isinstance(result, int) else 0


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that lucid knows; None for a fault of lucid itself."""
    if isinstance(error, CannotStartError):
        return error.exit_code
    codes = {ReportError: 7, NotComparableError: 5, EnvironmentUnusableError: 9, OSError: 9}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


def _is_help(error: click.ClickException) -> bool:
    """Return whether an error is the help of a group that was called without a command: it alone has several lines."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    return context is not None and error.message.startswith(context.get_usage())


def _os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
