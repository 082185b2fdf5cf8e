"""The verbs for runs on many nodes, and for runs that are going: fleet, pause, resume."""

from typing import Annotated

import typer

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
    require_prefect,
    show_extraction,
    starting,
    stop,
)

RunArgument = Annotated[str, typer.Argument(help="Name or id of the flow run.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command()
    def fleet(
        preset: Preset,
        deployment: Annotated[
            str | None, typer.Option(help="The deployment that extracts a shard, e.g. extract/kimi-k25.")
        ] = None,
        nodes: Annotated[int, typer.Option(min=1, max=256, help="Nodes that have a worker of its pool.")] = 2,
        ray: Annotated[bool, typer.Option("--ray", help="All nodes of the Ray cluster at RAY_ADDRESS.")] = False,
        dataset: Dataset = None,
        limit: Limit = None,
        store: OtherStore = None,
        chunk_tokens: ChunkTokens = None,
        force: Force = False,
        shuffle_seed: ShuffleSeed = None,
        only_failed: OnlyFailed = False,
    ) -> None:
        """Extract on many nodes at once. Ends with 0 only if everything asked for is in the store."""
        if ray == (deployment is not None):
            raise stop(ValueError("name a deployment whose workers extract the shards with --deployment, or use --ray"))
        extraction = load(preset)
        starting()
        knobs = (dataset, limit, store, chunk_tokens, force, shuffle_seed, only_failed)
        if deployment is not None:
            from flows.fleet import extract_fleet

            show_extraction(extract_fleet, extraction, deployment, nodes, *knobs)
        else:
            from flows.ray_fleet import extract_ray

            show_extraction(extract_ray, extraction, *knobs)

    @app.command()
    def pause(
        run: RunArgument,
        timeout: Annotated[int | None, typer.Option(min=1, help="Seconds after which it cannot be resumed.")] = None,
    ) -> None:
        """Let a run begin no further chunk. What the engine has begun is finished; the engine stays loaded."""
        from flows.pause import PauseError
        from flows.pause import pause as pause_run

        require_prefect()
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

        require_prefect()
        try:
            found = resume_run(run)
        except PauseError as error:
            raise stop(error) from None
        console.print(f"{found.name} goes on")
