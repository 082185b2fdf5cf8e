"""The verbs for runs on many nodes, and for runs that are going: fleet, pause, resume."""

from typing import Annotated, Any

import typer
from rich.console import Console

RunArgument = Annotated[str, typer.Argument(help="Name or id of the flow run.")]


def register(app: typer.Typer, console: Console) -> None:
    """Add the verbs to the command line."""

    def stop(error: BaseException) -> typer.Exit:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        return typer.Exit(1)

    @app.command()
    def fleet(
        preset: Annotated[str, typer.Argument(help="A preset's name, or a YAML file like those in infra/presets.")],
        deployment: Annotated[
            str | None, typer.Option(help="The deployment that extracts a shard, e.g. extract/kimi-k25.")
        ] = None,
        nodes: Annotated[int, typer.Option(min=1, max=256, help="Nodes that have a worker of its pool.")] = 2,
        ray: Annotated[bool, typer.Option("--ray", help="All nodes of the Ray cluster at RAY_ADDRESS.")] = False,
        dataset: Annotated[str | None, typer.Option(help="Another data file than the preset's.")] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="Read no more than this many rows of the data.")] = None,
        store: Annotated[str | None, typer.Option(help="Another store than the preset's.")] = None,
        chunk_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one chunk.")] = None,
        force: Annotated[bool, typer.Option("--force", help="Begin even if the samples may not fit.")] = False,
        shuffle_seed: Annotated[
            int | None, typer.Option(min=0, help="Read the rows in the random order of this seed, before any limit.")
        ] = None,
        only_failed: Annotated[
            bool, typer.Option("--only-failed", help="Extract only what the store's last run could not commit.")
        ] = False,
    ) -> None:
        """Extract on many nodes at once. Ends with 0 only if everything asked for is in the store."""
        from flows.config import ConfigError, Extraction

        if ray == (deployment is not None):
            raise stop(ValueError("name a deployment whose workers extract the shards with --deployment, or use --ray"))
        try:
            extraction = Extraction.load(preset)
        except ConfigError as error:
            raise stop(error) from None
        knobs: dict[str, Any] = {
            "dataset": dataset,
            "limit": limit,
            "store": store,
            "chunk_tokens": chunk_tokens,
            "force": force,
            "shuffle_seed": shuffle_seed,
            "only_failed": only_failed,
            "return_state": True,
        }
        state: Any
        if deployment is not None:
            from flows.fleet import extract_fleet

            state = extract_fleet(extraction, deployment, nodes, **knobs)
        else:
            from flows.ray_fleet import extract_ray

            state = extract_ray(extraction, **knobs)
        outcome: Any = state.result(raise_on_failure=False)
        if isinstance(outcome, BaseException):
            raise stop(outcome)
        console.print(outcome.table())
        if not state.is_completed():
            raise typer.Exit(1)

    @app.command()
    def pause(
        run: RunArgument,
        timeout: Annotated[int | None, typer.Option(min=1, help="Seconds after which it cannot be resumed.")] = None,
    ) -> None:
        """Let a run begin no further chunk. What the engine has begun is finished; the engine stays loaded."""
        from flows.pause import PauseError
        from flows.pause import pause as pause_run

        try:
            found = pause_run(run, timeout)
        except PauseError as error:
            raise stop(error) from None
        console.print(f"{found.name} pauses after the chunks that it has begun; `layertap resume {found.name}`")

    @app.command()
    def resume(run: RunArgument) -> None:
        """Let a paused run go on."""
        from flows.pause import PauseError
        from flows.pause import resume as resume_run

        try:
            found = resume_run(run)
        except PauseError as error:
            raise stop(error) from None
        console.print(f"{found.name} goes on")
