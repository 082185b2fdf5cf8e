"""The command line: what a person types becomes a flow run or a look into a store."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows import handoff_cli, runs_cli, store_cli
from flows.terminal import (
    ChunkTokens,
    Dataset,
    Force,
    Limit,
    OnlyFailed,
    OtherStore,
    Preset,
    ShuffleSeed,
    console,
    load,
    outcome,
    show_extraction,
    starting,
    stop,
)

# Read when Prefect, vLLM and torch are imported, so commands import them late; what the user has set stays.
DEFAULTS = {
    # A server started for one run may need long on a busy machine, and nothing reports home.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Prefect's records and tracebacks go to the server; a terminal shows this project's messages instead.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "layertap",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # As in pyproject.toml, which Prefect reads only where a command is run from this project's directory.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1.0",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Capture hidden states of large language models inside vLLM, prove them right, and store them as Zarr."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@app.command()
def extract(
    preset: Preset,
    dataset: Dataset = None,
    limit: Limit = None,
    store: OtherStore = None,
    chunk_tokens: ChunkTokens = None,
    force: Force = False,
    shuffle_seed: ShuffleSeed = None,
    only_failed: OnlyFailed = False,
) -> None:
    """Extract the hidden states that the store lacks. Ends with 0 only if everything asked for is there."""
    extraction = load(preset)  # Prefect takes seconds to import; a bad preset need not wait for it
    starting()
    from flows.extract import extract as flow

    show_extraction(flow, extraction, dataset, limit, store, chunk_tokens, force, shuffle_seed, only_failed)


@app.command()
def tokenize(
    preset: Preset,
    show: Annotated[int, typer.Option(min=0, help="Print this many samples, supervised tokens in colour.")] = 3,
    dataset: Dataset = None,
    limit: Limit = None,
    skipped: Annotated[bool, typer.Option("--skipped", help="List every row that cannot be used, and why.")] = False,
) -> None:
    """Tokenize the data as a run would, and show samples and statistics; nothing is stored."""
    from flows.config import ConfigError
    from tasks.model import ModelError, resolve
    from tasks.tokenize.errors import TokenizeError
    from tasks.tokenize.show import preview

    wanted = load(preset)
    try:
        wanted = wanted.overridden(dataset=dataset, limit=limit)
        checkpoint = resolve(wanted.model)
        identity, max_model_len = wanted.identity(checkpoint), wanted.engine.max_model_len
        report = preview(console, wanted.data, checkpoint, identity, max_model_len, show, skipped)
        report.require_samples(wanted.data.place)
    except (ConfigError, ModelError, TokenizeError) as error:
        raise stop(error) from None


@app.command()
def show(
    store: Annotated[str, typer.Argument(help="Directory or URL of the store.")],
    limit: Annotated[int, typer.Option(min=1, help="List no more than this many samples.")] = 50,
) -> None:
    """List the samples of a store."""
    from tasks.report.listing import show_samples
    from tasks.store import open as open_store

    reader = open_store(store)
    show_samples(reader.listing(), len(reader), limit, console)


@app.command()
def audit(
    store: Annotated[str, typer.Argument(help="Directory or URL of the store.")],
    model: Annotated[
        str | None, typer.Option(help="The checkpoint that filled it, if it is elsewhere than the store's runs say.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Recompute states and compare: `hf` by Hugging Face's forward, `solo` by the engine, one at a time."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="How many samples to recompute; all by default.")] = None,
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("audit.html"),
) -> None:
    """Check every stored byte, and prove the values against the checkpoint. Ends with 0 only if nothing is wrong."""
    if reference not in (None, "hf", "solo"):
        raise stop(ValueError(f"--reference {reference}: choose hf or solo"))
    if samples is not None and reference is None:
        raise stop(ValueError("--samples says how many to recompute; choose how with --reference hf or solo"))
    starting()
    from flows.audit import audit as flow

    _, report = outcome(flow, store, model, reference, samples, html)
    from tasks.report.audit_page import terminal

    console.print(terminal(report))
    console.print(f"report: {html}", highlight=False)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def doctor(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files (.pt, .safetensors, Zarr), or shapes such as 512x7168 or 771*[512].", show_default=False
        ),
    ] = None,
    prefect: Annotated[
        bool, typer.Option("--prefect", help="Look at the Prefect server instead: whether runs will be run and shown.")
    ] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers that were to be captured, L.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size of the model, H.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the samples, e.g. 512,259.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism.")] = 1,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers of the model.")] = None,
) -> None:
    """Say what probably happened to hidden states of the wrong shape, or what is wrong with the Prefect server."""
    if prefect:
        return _doctor_prefect()
    if not files:
        raise stop(ValueError("name files or shapes, or --prefect"))
    from tasks.verify.diagnose import Expected, describe, explain, parse_shape
    from tasks.verify.shapes import UnreadableFile, read_shapes

    try:
        known = tuple(int(n) for n in lengths.replace(",", " ").split())
    except ValueError:
        raise stop(ValueError(f"--lengths {lengths}: write numbers with commas between, e.g. 512,259")) from None
    raw: list[tuple[int, ...]] = []
    groups: list[tuple[str, list[tuple[int, ...]], tuple[int, ...]]] = []
    try:
        for file in files:
            if Path(file).exists() or Path(file).suffix in (".pt", ".pth", ".ckpt", ".bin", ".safetensors"):
                contents = read_shapes(Path(file))
                own = known or (() if contents.num_tokens is None else (contents.num_tokens,))
                groups.append((f"{file}: ", list(contents.shapes), own))
            else:
                raw += parse_shape(file)
    except (UnreadableFile, ValueError) as error:
        raise stop(error) from None
    if raw:
        groups.append(("", raw, known))
    for name, shapes, own in groups:
        expected = Expected(layers, hidden, own, tp, num_layers)
        console.print(f"{name}{describe(shapes)}", highlight=False, markup=False, soft_wrap=True)
        console.print(explain(shapes, expected), highlight=False, markup=False, soft_wrap=True)


def run() -> None:
    """The console script: what is wrong with a store or a path is one line, not a traceback."""
    from tasks.store.errors import StoreError

    try:
        app()
    except StoreError as error:
        sys.exit(stop(error).exit_code)


def _doctor_prefect() -> None:
    from flows.doctor import examine

    problems = examine()
    for problem in problems:
        console.print(f"[red]wrong:[/red] {escape(problem.what)}", highlight=False, soft_wrap=True)
        console.print(f"       {escape(problem.remedy)}", highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    console.print("Prefect is set up: runs of the deployments will be run and shown", highlight=False)


store_cli.register(app, console)
runs_cli.register(app)
handoff_cli.register(app)

if __name__ == "__main__":
    run()
