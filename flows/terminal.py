"""What the verbs of the command line share: their options, their messages, and how a run ends there."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from tasks.report.log import logger

if TYPE_CHECKING:
    from flows.config import Extraction

console = Console()
_errors = Console(stderr=True)

Preset = Annotated[str, typer.Argument(help="A preset's name, or a YAML file like those in infra/presets.")]
Dataset = Annotated[str | None, typer.Option(help="Another data file than the preset's.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read no more than this many rows of the data.")]
OtherStore = Annotated[str | None, typer.Option(help="Another store than the preset's.")]
ChunkTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of one chunk.")]
Force = Annotated[bool, typer.Option("--force", help="Begin even if what will be written may not fit.")]
ShuffleSeed = Annotated[
    int | None, typer.Option(min=0, help="Read the rows in the random order of this seed, before any limit.")
]
OnlyFailed = Annotated[
    bool, typer.Option("--only-failed", help="Extract only what the store's last run could not commit.")
]


def stop(error: BaseException) -> typer.Exit:
    """Say what is wrong in one line; to be raised."""
    _errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def load(preset: str) -> "Extraction":
    """A preset; one that is not there or holds what it must not ends the command, before Prefect is imported."""
    from flows.config import ConfigError, Extraction

    try:
        return Extraction.load(preset)
    except ConfigError as error:
        raise stop(error) from None


def starting() -> None:
    """Say that the command has begun; to be called before Prefect is imported, which takes seconds."""
    _errors.print("starting Prefect", style="dim")


def require_prefect() -> None:
    """End the command where a Prefect server is named and does not answer: runs report to it."""
    from prefect.settings import get_current_settings

    from flows.doctor import no_answer

    address = get_current_settings().api.url
    if address and (problem := no_answer(address)):
        raise stop(RuntimeError(f"{problem.what}; {problem.remedy}"))


def log_to_terminal() -> None:
    """Show the project's messages."""
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(console=_errors, show_path=False, show_time=False, highlighter=None))
    warnings.filterwarnings("ignore", category=FutureWarning)


def outcome(flow: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Run a flow; returns its state and what it left, once its records are written down.

    A run that was cut off by an error ends the command, and so does an interrupt.
    """
    require_prefect()
    log_to_terminal()
    from flows.interrupt import interruptible
    from flows.own_server import OwnServer
    from flows.run import settle

    OwnServer()  # in the place of Prefect's, if one is needed

    def run() -> Any:
        state: Any = flow(*arguments, return_state=True)
        settle(state.state_details.flow_run_id)
        return state

    state = interruptible(run)
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        raise stop(result)
    return state, result


def show_extraction(flow: Callable[..., Any], *arguments: Any) -> None:
    """Run a flow that extracts, and print its summary; ends with 1 unless everything asked for is in the store."""
    state, summary = outcome(flow, *arguments)
    console.print(summary.table())
    if not state.is_completed():
        raise typer.Exit(1)
