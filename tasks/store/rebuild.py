"""The manifest, rebuilt from what the samples themselves say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tasks.store.backend import Backend
from tasks.store.errors import DamagedSample, DamagedStore, ForeignSample
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
    foreign: Sequence[str]
    """Keys of samples of another extraction; they stay where they are, and are not listed."""


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

    Raises:
        DamagedStore: no sample is of this identity, so it is not the samples that are wrong; nothing is changed.
    """
    before = set(manifest.entries)
    entries: dict[str, Entry] = {}
    sources: dict[str, Source] = {}
    damaged: dict[str, str] = {}
    foreign: set[str] = set()

    def check(key: str) -> Record | str | None:
        try:
            return probe(backend, key, identity)
        except FileNotFoundError:
            return None
        except DamagedSample as error:
            if isinstance(error, ForeignSample):
                foreign.add(key)
            return error.problem

    # In the manifest's order where it has one, so that positions stay what they were.
    present = set(keys_present(backend))
    keys = [*(key for key in manifest.entries if key in present), *sorted(present - before)]
    records: dict[str, Record] = {}
    for number, (key, outcome) in enumerate(each(check, keys, workers), 1):
        if isinstance(outcome, Record):
            records[key] = outcome
        elif outcome is not None and key not in foreign:
            damaged[key] = outcome
        if progress:
            progress(number, len(keys), 0)
    if foreign and not records:
        raise DamagedStore(
            f"the samples of {backend.url} are of another extraction than its zarr.json says, which was altered or "
            "replaced: put back what it was; nothing was changed"
        )
    for key in filter(records.__contains__, keys):
        entries[key] = Entry.of(records[key])
        sources |= {source: Source(key, spans) for source, spans in records[key].sources.items()}
    sources |= {name: source for name, source in manifest.sources.items() if source.key in entries}
    manifest.entries, manifest.sources = entries, sources
    manifest.rewrite()
    return Rebuilt(len(entries), len(entries.keys() - before), len(before - entries.keys()), damaged, sorted(foreign))


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
