"""The table of a store's samples."""

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from rich.console import Console
from rich.table import Table


class Row(Protocol):
    """What is shown of a sample; :class:`tasks.store.Listed` is one."""

    @property
    def key(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def depths(self) -> tuple[int, ...]: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def nbytes(self) -> int: ...


def show_samples(rows: Iterable[Row], total: int, limit: int, console: Console) -> None:
    """Print the first ``limit`` samples: key, shape [L, T, H], depths, tokens, bytes and source ids."""
    table = Table(title=f"{total} samples", title_justify="left")
    for column in ("key", "shape", "depths", "tokens", "kB", "sources"):
        table.add_column(column, justify="right" if column in ("tokens", "kB") else "left")
    for row in islice(rows, limit):
        table.add_row(
            row.key[:12],
            str(list(row.shape)),
            ", ".join(f"r_{k}" for k in row.depths),
            f"{row.num_tokens:,}",
            f"{row.nbytes / 1e3:,.1f}",
            ", ".join(row.sources),
        )
    console.print(table)
    if total > limit:
        console.print(f"... and {total - limit} more (--limit {total} lists all)")
