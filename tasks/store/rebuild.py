"""The manifest, rebuilt from what the samples themselves say."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tasks.store.backend import Backend
from tasks.store.errors import DamagedSample
from tasks.store.integrity import probe
from tasks.store.layout import Record
from tasks.store.manifest import Entry, ManifestWriter, Source, keys_present
from tasks.vocabulary import Identity

Progress = Callable[[int, int, int], None]
"""Called as (samples done, samples in all, bytes read so far)."""


@dataclass(frozen=True)
class Rebuilt:
    """What :func:`rebuild` did."""

    samples: int
    """Listed in the manifest now."""
    added: int
    """Of these, how many it did not list before."""
    dropped: int
    """Listed before, but not whole in the store."""
    damaged: Mapping[str, str]
    """Key -> what is wrong."""


def rebuild(
    backend: Backend,
    identity: Identity,
    manifest: ManifestWriter,
    *,
    workers: int = 8,
    progress: Progress | None = None,
) -> Rebuilt:
    """Let a manifest list the samples that are whole, by their completion records and their files' sizes.

    Source ids that are recorded in the manifest alone are kept where it still has them. Nobody else may write.
    """
    before = set(manifest.entries)
    entries: dict[str, Entry] = {}
    sources: dict[str, Source] = {}
    damaged: dict[str, str] = {}

    def check(key: str) -> Record | str | None:
        try:
            return probe(backend, key, identity)
        except FileNotFoundError:
            return None
        except DamagedSample as error:
            return error.problem

    # In the manifest's order where it has one, so that positions stay what they were.
    present = set(keys_present(backend))
    keys = [*(key for key in manifest.entries if key in present), *sorted(present - before)]
    records: dict[str, Record] = {}
    for number, (key, outcome) in enumerate(each(check, keys, workers), 1):
        if isinstance(outcome, Record):
            records[key] = outcome
        elif outcome is not None:
            damaged[key] = outcome
        if progress:
            progress(number, len(keys), 0)
    for key in filter(records.__contains__, keys):
        entries[key] = Entry.of(records[key])
        sources |= {source: Source(key, spans) for source, spans in records[key].sources.items()}
    sources |= {name: source for name, source in manifest.sources.items() if source.key in entries}
    manifest.entries, manifest.sources = entries, sources
    manifest.rewrite()
    return Rebuilt(len(entries), len(entries.keys() - before), len(before - entries.keys()), damaged)


def each(
    action: Callable[[str], Record | str | None], keys: list[str], workers: int
) -> Iterator[tuple[str, Record | str | None]]:
    """Results of the action in the order they are done, with few keys under way at a time."""
    remaining = iter(keys)
    pending: dict[Future[Record | str | None], str] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="samples") as pool:
        try:
            while True:
                while len(pending) < 2 * workers and (key := next(remaining, None)) is not None:
                    pending[pool.submit(action, key)] = key
                if not pending:
                    return
                for done in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(done), done.result()
        finally:
            pool.shutdown(cancel_futures=True)
