"""The verbs that hand a store to trainers of other projects, and take their files in: export and import."""

from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import Force, console, outcome, starting, stop

Depths = Annotated[
    str | None,
    typer.Option(help="Auxiliary depths k of r_k, e.g. 3,15,27, where they are not those of the project's default."),
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""

    @app.command()
    def export(
        store: Annotated[str, typer.Argument(help="Directory or URL of the store.")],
        directory: Annotated[Path, typer.Argument(help="Empty, new, or of an earlier export, which is continued.")],
        to: Annotated[str, typer.Option(help="speculators, specforge, model-optimizer or safetensors.")],
        depths: Depths = None,
        draft_vocab: Annotated[
            int | None, typer.Option(min=1, help="Choose a draft vocabulary of this many tokens, too.")
        ] = None,
        model: Annotated[
            str | None, typer.Option(help="The checkpoint that filled the store, for the vocabulary's size.")
        ] = None,
        chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one chunk.")] = 65_536,
        force: Force = False,
    ) -> None:
        """Write a store as the files of another project's trainer. Ends with 0 only if all of it is there."""
        chosen = _depths(depths)
        _known(to)
        starting()
        from flows.export import export as flow

        _, report = outcome(flow, store, directory, to, chosen, draft_vocab, model, chunk_tokens, force)
        for name, problem in report.failed.items():
            console.print(f"{name}: {problem}", highlight=False, soft_wrap=True, markup=False)
        console.print(
            f"{report.message}: {report.present} were there, {report.written} written ({report.nbytes / 1e6:,.1f} MB), "
            f"{report.linked} hard links, {report.removed} removed",
            highlight=False,
            soft_wrap=True,
        )
        if not report.complete:
            raise typer.Exit(1)
        console.print(
            f"{report.tokens:,} tokens; {report.unsupervised} rows without a supervised token, {report.single_token} "
            f"of one token\nfor the trainer: {report.trainer}",
            highlight=False,
            soft_wrap=True,
        )
        if report.coverage is not None:
            console.print(f"draft vocabulary: covers {report.coverage:.2%} of the supervised tokens", highlight=False)

    @app.command("import")
    def import_files(
        directory: Annotated[Path, typer.Argument(help="Where the files are.", exists=True, file_okay=False)],
        store: Annotated[str, typer.Argument(help="Directory or URL of the store that they become.")],
        origin: Annotated[str, typer.Option("--from", help="speculators, specforge or model-optimizer.")],
        model: Annotated[str, typer.Option(help="The checkpoint that the states come from.")],
        depths: Depths = None,
        chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one chunk.")] = 65_536,
        force: Force = False,
    ) -> None:
        """Audit existing extractions, and commit the good files to a store. Ends with 0 only if all are good."""
        chosen = _depths(depths)
        _known(origin)
        starting()
        from flows.import_files import import_files as flow

        _, report = outcome(flow, directory, store, origin, model, chosen, chunk_tokens, force)
        for each in report.refused:
            console.print(f"{each.file}: {each.reason}: {each.detail}", highlight=False, soft_wrap=True, markup=False)
        console.print(
            f"{report.message}: {report.committed} committed ({report.tokens:,} tokens), {report.present} were there, "
            f"{report.duplicates} with the tokens of another",
            highlight=False,
            soft_wrap=True,
        )
        if report.rows_predicted:
            share = report.hits / report.rows_predicted
            console.print(f"{share:.1%} of {report.rows_predicted:,} rows predict their next token", highlight=False)
        if not report.passed:
            raise typer.Exit(1)


def _known(name: str) -> None:
    """A name that is no format ends the command before Prefect is imported."""
    from tasks.handoff.errors import HandoffError
    from tasks.handoff.formats import by_name

    try:
        by_name(name)
    except HandoffError as error:
        raise stop(error) from None


def _depths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(depth) for depth in text.replace(",", " ").split())
    except ValueError:
        raise stop(ValueError(f"--depths {text}: write numbers with commas between, e.g. 3,15,27")) from None
