"""The verbs that look after a store: verify, repair, gc, stats."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

StoreArgument = Annotated[str, typer.Argument(help="Directory or URL of the store.")]


def register(app: typer.Typer, console: Console) -> None:
    """Add the verbs to the command line."""

    @app.command()
    def verify(
        store: StoreArgument,
        workers: Annotated[int, typer.Option(min=1, help="Samples read at a time.")] = 4,
        resume: Annotated[
            Path | None, typer.Option(help="A file that lets an interrupted call continue where it was.")
        ] = None,
        set_aside: Annotated[
            bool,
            typer.Option("--set-aside", help="Take damaged samples out; the next run extracts them again."),
        ] = False,
    ) -> None:
        """Read every byte of a store and compare it with what was committed. Ends with 0 only if all is whole."""
        from tasks.store import maintenance

        with Progress(console=Console(stderr=True), transient=True) as bar:
            line = bar.add_task("verifying")
            found = maintenance.verify(
                store,
                workers=workers,
                resume=resume,
                set_aside=set_aside,
                progress=lambda done, total, nbytes: bar.update(line, completed=done, total=total),
            )
        for key, problem in found.damaged.items():
            console.print(f"damaged {key}: {problem}", highlight=False, soft_wrap=True)
        for key in found.foreign:
            console.print(f"of another extraction {key}", highlight=False, soft_wrap=True)
        for problem in [*found.store_problems, *found.other_problems]:
            console.print(f"store: {problem}", highlight=False, soft_wrap=True)
        console.print(
            f"{found.samples} samples checked, {found.nbytes / 1e6:,.1f} MB read, {len(found.damaged)} damaged, "
            f"{len(found.foreign)} of another extraction, "
            f"{len(found.unrecorded)} not in the manifest, {len(found.leftovers)} unfinished"
        )
        for remedy in found.remedies(store):
            console.print(remedy, highlight=False, soft_wrap=True, markup=False)
        if not found.ok:
            raise typer.Exit(1)

    @app.command()
    def repair(store: StoreArgument) -> None:
        """Put the root group back from its copy, and rebuild the manifest from the samples themselves."""
        from tasks.store import maintenance

        done = maintenance.repair(store)
        for key, problem in done.damaged.items():
            console.print(f"damaged {key}: {problem}", highlight=False, soft_wrap=True)
        for key in done.foreign:
            console.print(f"of another extraction {key}: not listed", highlight=False, soft_wrap=True)
        if done.root:
            console.print(f"put {store}/zarr.json back from its copy", highlight=False, soft_wrap=True)
        console.print(
            f"{done.samples} samples listed ({done.added} added, {done.dropped} dropped), {done.groups} groups mended"
        )

    @app.command()
    def gc(store: StoreArgument) -> None:
        """Remove what dead runs left behind, and damaged samples that were set aside."""
        from tasks.store import maintenance

        done = maintenance.gc(store)
        console.print(
            f"removed {done.staging} staging directories, {done.set_aside} samples set aside, {done.leftovers} "
            f"unfinished samples, {done.links} shared chunks without a sample: {done.nbytes / 1e6:,.1f} MB"
        )

    @app.command()
    def vocabulary(
        store: StoreArgument,
        out: Annotated[Path, typer.Argument(help="The .safetensors file to write: token_freq, d2t and t2d.")],
        size: Annotated[int, typer.Option(min=1, help="Tokens that the draft model knows.")],
        model: Annotated[Path, typer.Option(help="The checkpoint that filled the store; gives the vocabulary's size.")],
    ) -> None:
        """Choose a draft model's vocabulary: the tokens that are supervised most often in all samples of a store."""
        from safetensors.numpy import save_file

        from tasks.model import ModelError, read
        from tasks.paths import follow_umask
        from tasks.store import open as open_store
        from tasks.tokenize.draft_vocabulary import count_tokens, draft_vocabulary

        reader = open_store(store)
        try:
            vocab_size = read(model).vocab_size
            counts = count_tokens(map(reader.tokens, reader.keys), vocab_size)
            chosen = draft_vocabulary(counts, size)
        except (ModelError, ValueError) as error:
            console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        save_file({"token_freq": counts, "d2t": chosen.d2t, "t2d": chosen.t2d}, out)
        follow_umask(out)
        console.print(f"{out}: {size} of {vocab_size} tokens cover {chosen.coverage:.2%} of the supervised tokens")

    @app.command()
    def stats(store: StoreArgument) -> None:
        """Counts, bytes and lengths of a store."""
        from tasks.store import maintenance

        found = maintenance.stats(store)
        table = Table(title=store, title_justify="left", show_header=False)
        table.add_row("samples", f"{found.samples:,} of {found.sources:,} source ids")
        table.add_row("tokens", f"{found.tokens:,}")
        table.add_row("lengths", ", ".join(f"{name} {value:,}" for name, value in found.lengths.items()))
        table.add_row(
            "bytes",
            f"{found.stored_bytes / 1e6:,.1f} MB for {found.computed_bytes / 1e6:,.1f} MB of states, "
            f"ratio {found.ratio:.2f}",
        )
        shared = 1 - found.disk_bytes / found.stored_bytes if found.stored_bytes else 0.0
        table.add_row("on disk", f"{found.disk_bytes / 1e6:,.1f} MB, since samples share {shared:.0%} of their bytes")
        table.add_row("quarantined", f"{found.quarantined} samples")
        for depth, error in (found.quantization_error or {}).items():
            table.add_row(f"fp8 error r_{depth}", f"{error:.2%} of a row's norm, mean")
        console.print(table)
