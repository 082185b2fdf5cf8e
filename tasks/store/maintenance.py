"""What people do to a store after a run: verify, stats, repair, gc; and the check of room before one."""

import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasks.store import layout
from tasks.store.backend import Expected, open_backend
from tasks.store.errors import DamagedSample, ForeignSample, NoSpace
from tasks.store.final_norm import final_norm_problem
from tasks.store.integrity import altered_groups, checked_files, load_record, strangers
from tasks.store.layout import PRIVATE, RECORD, Record, StateSpec, sample_path
from tasks.store.manifest import Entry, Manifest, keys_present
from tasks.store.rebuild import Progress, Rebuilt, each
from tasks.store.root import describe, restore_root, root_problem, stored_identity
from tasks.store.store import QUARANTINE, Store

# Bytes as computed / bytes stored that a plan may count on; real states do a little better.
EXPECTED_RATIO = {"bfloat16": 1.4, "float32": 1.1, "float8_e4m3": 2.0}
_FILE_OVERHEAD = 8 * 4096  # a small sample's files, by the blocks that a file system gives them


@dataclass(frozen=True)
class Preflight:
    """Room for planned samples."""

    needed_bytes: int
    free_bytes: int | None
    """None where the place has no such limit."""
    bytes_per_million_tokens: int
    staged_bytes: int
    """Staged but not yet committed at a time; a part of the needed bytes in a local store."""
    staging_free_bytes: int

    @property
    def fits(self) -> bool:
        stored = self.free_bytes is None or self.needed_bytes <= self.free_bytes
        return stored and self.staged_bytes <= self.staging_free_bytes

    def __str__(self) -> str:
        needed = f"{_gb(self.needed_bytes)} needed ({_gb(self.bytes_per_million_tokens)} per 1M tokens)"
        if self.free_bytes is not None:
            return f"{needed}, {_gb(self.free_bytes)} free"
        return f"{needed}; {_gb(self.staged_bytes)} staged at a time, {_gb(self.staging_free_bytes)} free for that"


def preflight(
    store: Store, num_tokens: int, num_samples: int, *, chunk_tokens: int = 0, force: bool = False
) -> Preflight:
    """Check, before anything is extracted, that the planned samples fit.

    Args:
        store: The store they will go to.
        num_tokens: Tokens of all samples that are missing.
        num_samples: Their number.
        chunk_tokens: Tokens of the largest chunk of samples that is staged before it is committed.
        force: Do not refuse.

    Raises:
        NoSpace: they do not fit.
    """
    spec = store.spec
    ratio = EXPECTED_RATIO[spec.stored_as if spec.is_fp8 else spec.dtype]
    per_token = spec.nbytes(1) / ratio + 5
    found = Preflight(
        needed_bytes=int(num_tokens * per_token) + num_samples * _FILE_OVERHEAD,
        free_bytes=store.backend.free_bytes(),
        bytes_per_million_tokens=int(1_000_000 * per_token),
        staged_bytes=int(chunk_tokens * per_token),
        staging_free_bytes=store.backend.staging_free_bytes(),
    )
    if not (found.fits or force):
        raise NoSpace(
            f"{store.url}: {found}. Free space, choose another store, extract fewer samples or depths, or go on with "
            "--force"
        )
    return found


@dataclass(frozen=True)
class Stats:
    """What a store holds, from its manifest."""

    samples: int
    sources: int
    tokens: int
    computed_bytes: int
    """States as the engine computed them."""
    stored_bytes: int
    """All files of the samples."""
    disk_bytes: int
    """The same, with a file that samples share counted once."""
    lengths: Mapping[str, int]
    """min, median, p90 and max tokens of a sample."""
    quarantined: int
    quantization_error: Mapping[int, float] | None
    """Of an fp8 store: depth -> relative error of a row against what was computed, the mean over all rows."""

    @property
    def ratio(self) -> float:
        return self.computed_bytes / self.stored_bytes if self.stored_bytes else 0.0


def stats(url: str | os.PathLike[str]) -> Stats:
    """Counts, bytes and lengths of a store. Where samples share chunks, their files are looked at, too."""
    backend = open_backend(url)
    identity = stored_identity(backend)
    manifest = Manifest(backend).require_whole()
    entries = list(manifest.entries.values())
    lengths = np.array([entry.num_tokens for entry in entries], dtype=np.int64)
    tokens = int(lengths.sum())
    stored = sum(entry.nbytes for entry in entries)
    error = None
    if identity.stored_as == "float8_e4m3" and entries:
        weighted_L = np.array([entry.error or () for entry in entries]).T @ lengths / tokens
        error = dict(zip(identity.depths, weighted_L.tolist(), strict=True))
    marks = {"min": 0.0, "median": 0.5, "p90": 0.9, "max": 1.0} if entries else {}
    return Stats(
        samples=len(entries),
        sources=len(manifest.sources),
        tokens=tokens,
        computed_bytes=StateSpec.of(identity).nbytes(tokens),
        stored_bytes=stored,
        disk_bytes=stored - backend.shared_bytes(_expected(manifest.entries, StateSpec.of(identity))),
        lengths={name: int(np.quantile(lengths, mark, method="nearest")) for name, mark in marks.items()},
        quarantined=len(backend.names(QUARANTINE)),
        quantization_error=error,
    )


def _expected(entries: Mapping[str, Entry], spec: StateSpec) -> Iterator[Expected]:
    for key, entry in entries.items():
        yield key, spec.files(entry.num_tokens), entry.sizes


@dataclass
class Verification:
    """What :func:`verify` found."""

    samples: int = 0
    """Checked in this call and, with ``resume``, before."""
    nbytes: int = 0
    """Read in this call."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Key -> what is wrong."""
    foreign: list[str] = field(default_factory=list)
    """Whole by their records, but of another extraction than the store; never set aside."""
    set_aside: list[str] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    """Whole samples that the manifest does not list, so that no reader sees them; `layertap repair` lists them."""
    leftovers: list[str] = field(default_factory=list)
    """Keys with files but no completion record; `layertap gc` removes them."""
    strangers: list[str] = field(default_factory=list)
    """Paths beside the samples that are no part of the store."""
    store_problems: list[str] = field(default_factory=list)
    """Damage outside of samples; `layertap repair` mends it."""
    other_problems: list[str] = field(default_factory=list)
    """Damage of the final norm or of the root group; each sentence says what mends it."""

    @property
    def ok(self) -> bool:
        return not (self.damaged or self.foreign or self.unrecorded or self.store_problems or self.other_problems)

    def remedies(self, url: str) -> Iterator[str]:
        """What to do about it, a sentence for each kind of damage that a command mends."""
        if self.set_aside:
            yield (
                f"{len(self.set_aside)} damaged samples were taken out of the store: extract again, and they come back"
            )
        elif self.damaged:
            yield (
                f"take the damaged samples out with `layertap verify {url} --set-aside` and extract again: the run "
                "extracts them anew, and nothing else"
            )
        if self.foreign:
            yield (
                f"{len(self.foreign)} samples are of another extraction than {url}/zarr.json says; they are not "
                "damaged, and nothing here reads them. Move their directories, samples/<first two digits>/<key>, into "
                "an empty directory, and extract to that with the settings that they were made with: that run takes "
                f"them up. Then `layertap repair {url}`"
            )
        if self.unrecorded or self.store_problems:
            yield f"`layertap repair {url}` rebuilds the manifest and what lies between it and the samples"
        if self.leftovers:
            yield f"`layertap gc {url}` removes the unfinished samples; no reader sees them"
        if self.strangers:
            yield f"no part of the store, and never read: {', '.join(self.strangers)}; remove or move it"


def verify(
    url: str | os.PathLike[str],
    *,
    workers: int = 4,
    resume: Path | None = None,
    set_aside: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Read every file of every sample and compare it with what was committed; one that samples share is read once.

    Args:
        url: The store; it may be written to meanwhile, unless ``set_aside``.
        workers: Samples read at a time.
        resume: A file that notes which samples were found good, so that an interrupted call continues where it was
            when it is made again; removed at the end.
        set_aside: Take damaged samples out of the store, so that the next run extracts them again.
        progress: Called after each sample.

    Raises:
        NotAStore: there is none.
        DamagedStore: the root group is missing or altered; nothing is set aside then.
        StoreBusy: a run is writing, and ``set_aside`` was asked for.
    """
    backend = open_backend(url)
    identity = stored_identity(backend)
    manifest = Manifest(backend)
    listed = manifest.entries
    altered = (f"{path} is missing or altered" for path in altered_groups(backend))
    found = Verification(store_problems=[*manifest.problems, *altered], strangers=list(strangers(backend)))
    attributes = describe(backend)
    altered_root = root_problem(backend, attributes)
    found.other_problems += filter(None, (altered_root, final_norm_problem(backend, attributes)))
    keys = list(dict.fromkeys([*listed, *keys_present(backend)]))
    passed = set(resume.read_text().split()) if resume and resume.exists() else set()

    whole: set[tuple[Hashable, int, int]] = set()
    foreign: set[str] = set()
    lock = threading.Lock()

    def check(key: str) -> Record | str | None:
        try:
            record = load_record(backend, key, identity)
            nbytes = record.nbytes
            shared = {}
            for path, (size, crc) in record.objects.items():
                if (file := backend.shared_file(f"{sample_path(key)}/{path}")) is not None:
                    shared[path] = (file, size, crc)
            unread = [path for path in record.objects if path not in shared or shared[path] not in whole]
            for _, content in checked_files(backend, record, unread):
                nbytes += len(content)
            with lock:
                whole.update(shared.values())
                found.nbytes += nbytes
        except FileNotFoundError:
            return "its directory or its zarr.json is missing" if key in listed else None
        except DamagedSample as error:
            if isinstance(error, ForeignSample):
                foreign.add(key)
            return error.problem
        if key in listed and sum(record.sizes) != listed[key].nbytes:
            return "it is another sample than the manifest lists"
        return record

    log = resume.open("a") if resume else None
    try:
        remaining = [key for key in keys if key not in passed]
        found.samples = len(keys) - len(remaining)
        for key, outcome in each(check, remaining, workers):
            found.samples += isinstance(outcome, Record | str)
            if key in foreign:
                found.foreign.append(key)
            elif isinstance(outcome, str):
                found.damaged[key] = outcome
            elif outcome is None:
                if backend.sizes(sample_path(key)):
                    found.leftovers.append(key)
            else:
                if key not in listed:
                    found.unrecorded.append(key)
                if log:
                    log.write(key + "\n")
            if progress:
                progress(found.samples, len(keys), found.nbytes)
    finally:
        if log:
            log.close()
    if found.unrecorded:  # a run may have listed them since
        since = Manifest(backend).entries
        found.unrecorded = [key for key in found.unrecorded if key not in since]
    if foreign and found.samples == len(found.foreign) + len(found.damaged):
        # Then it is not the samples that are wrong.
        found.foreign = []
        found.other_problems.append(
            f"all {len(foreign)} samples are of another identity than {backend.url}/zarr.json says: that file was "
            f"altered or replaced{'' if altered_root else '; put back what it was'}. Nothing is set aside"
        )
    elif set_aside and found.damaged:
        with Store.open(url, identity, run="verify") as store:
            for key in found.damaged:
                store.backend.set_aside(key)
                found.set_aside.append(key)
            store.forget(found.set_aside)
    if resume:
        resume.unlink()
    return found


@dataclass(frozen=True)
class Repair(Rebuilt):
    """What :func:`repair` did."""

    groups: int
    """Group documents written again."""
    root: bool
    """Whether the root's was put back from its copy."""


def repair(url: str | os.PathLike[str], *, workers: int = 8, progress: Progress | None = None) -> Repair:
    """Put the root back from its copy, rebuild the manifest from the samples' records, and missing group documents.

    Source ids that earlier runs added to samples which were already there are kept where the manifest still has them;
    a rerun of the extraction records the others again.

    Raises:
        StoreBusy: a run is writing to the store.
        DamagedStore: the root is not that of the samples, and there is no copy of theirs.
    """
    backend = open_backend(url)
    root = restore_root(backend)
    identity = stored_identity(backend)
    with Store.open(url, identity, run="repair") as store:
        backend = store.backend
        done = store.rebuilt or store.rebuild_manifest(workers=workers, progress=progress)
        groups = list(altered_groups(backend))
        if groups:
            backend.put_all(dict.fromkeys(groups, layout.group_document()))
    return Repair(**vars(done), groups=len(groups), root=root)


@dataclass(frozen=True)
class Collection:
    """What :func:`gc` removed."""

    staging: int
    """Staging directories of dead runs."""
    set_aside: int
    """Damaged samples that had been set aside."""
    leftovers: int
    """Half-written samples, which no reader took for samples."""
    links: int
    """Shared chunks that no sample has any more."""
    nbytes: int
    """Bytes of the last three."""


def gc(url: str | os.PathLike[str]) -> Collection:
    """Remove what no reader looks at: dead runs' staging, samples set aside, half-written samples, chunks left over.

    Raises:
        StoreBusy: a run is writing to the store.
    """
    identity = stored_identity(open_backend(url))
    with Store.open(url, identity, run="gc") as store:
        backend = store.backend
        aside = backend.names(f"{PRIVATE}/damaged")
        nbytes = sum(backend.sizes(f"{PRIVATE}/damaged").values())
        backend.remove(f"{PRIVATE}/damaged")
        leftovers = 0
        for key in keys_present(backend):
            if key in store.manifest.entries or RECORD in (sizes := backend.sizes(sample_path(key))):
                continue
            nbytes += sum(sizes.values())
            leftovers += bool(sizes)
            backend.remove(sample_path(key))
        links, unlinked = backend.links.collect() if backend.links is not None else (0, 0)
        return Collection(store.collected, len(aside), leftovers, links, nbytes + unlinked)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
