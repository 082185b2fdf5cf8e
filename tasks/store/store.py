"""Writing: what is missing, stage, commit, record.

The order is fixed. A sample's files are staged; when the verification has accepted it, :meth:`Store.commit` makes
it visible in one step; :meth:`Store.record` then lists it in the manifest. A run killed at any point leaves
either a whole sample or none, and the next run finds what was committed even where the manifest has no word of it.

One run writes to a store at a time; a second is refused (:class:`StoreBusy`) and can be told to wait. Several runs
that have agreed who extracts which keys may write together, each under a :class:`Share` of one group. Each stages in a
directory of its own, commits its own keys and adds segments of its own to the manifest, so that nothing is written by
two; whatever touches more than that (merging the manifest, repair, gc) is left to a run that is alone with the store.
A share that another process takes over shuts its last holder out, so a key has one writer even if a node that was
given up for dead comes back.
"""

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.store import layout
from tasks.store.backend import Backend, Publication, Share, open_backend
from tasks.store.errors import (
    DamagedSample,
    DamagedStore,
    IdentityMismatch,
    NotAStore,
    StoreBusy,
    StoreError,
    storage_failures,
)
from tasks.store.final_norm import WEIGHT, FinalNorm, final_norm_problem, load_final_norm, weight_documents
from tasks.store.integrity import probe
from tasks.store.layout import PRIVATE, RECORD, StateSpec, sample_path
from tasks.store.manifest import Batch, Entry, ManifestWriter, Source, Spans, to_spans
from tasks.store.provenance import environment, without_secrets
from tasks.store.rebuild import Progress, Rebuilt, rebuild
from tasks.store.root import COPY, FORMAT, describe, keep_root, recorded, refuse_mixture, stored_identity
from tasks.store.stage import write_file
from tasks.vocabulary import Identity, Objects

QUARANTINE = f"{PRIVATE}/quarantine"
FAILED = f"{PRIVATE}/failed"
RUNS = f"{PRIVATE}/runs"
_SAFE_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, eq=False)
class StagedSample:
    """A verified sample, ready to commit."""

    key: str
    num_tokens: int
    objects: Objects
    """What staging returned."""
    loss_mask: npt.ArrayLike
    """[T], true where a trainer supervises the token."""
    next_token: int | None = None
    sources: Sequence[str] | Mapping[str, npt.ArrayLike] = ()
    """Source ids known at commit time, kept with the sample so that the manifest can be rebuilt; a mapping where
    some have a loss mask [T] of their own."""
    capture: Mapping[str, Any] = field(default_factory=dict)
    """What the verification leaves with the sample (digests, norms); plain JSON."""


@dataclass(frozen=True, eq=False)
class SourceRecord:
    """A source id, the key of its tokens, and its own loss mask [T]."""

    source_id: str
    key: str
    loss_mask: npt.ArrayLike


@dataclass(frozen=True)
class Quarantined:
    """A sample that the verification refused; never counts as done."""

    key: str
    sources: tuple[str, ...]
    reason: str
    detail: str
    evidence: Any = None
    run: str = ""
    time: str = ""


class Store:
    """A store opened for writing; a context manager. Methods may be called from several threads."""

    def __init__(self, backend: Backend, identity: Identity, run: str, share: Share | None = None) -> None:
        """Use :meth:`open`."""
        self.backend = backend
        self.identity = identity
        self.spec = StateSpec.of(identity)
        self.run = run
        self._lock = threading.RLock()
        self.share = share
        self._lease = backend.lease(run, share)
        self._pending = Batch()
        self._staging: Path | None = None
        self._provenance: tuple[str, dict[str, Any]] | None = None
        self._closed = False
        self.rebuilt: Rebuilt | None = None
        """What became of the manifest where it was found damaged on opening."""
        self.committed = 0
        """Samples that were committed since the store was opened."""
        try:
            self.collected = backend.collect_staging(alone=share is None)
            self.manifest = ManifestWriter(backend, f"{run}-{share.name}" if share else run, alone=share is None)
            self._quarantined = {name.removesuffix(".json") for name in backend.names(QUARANTINE)}
            self._shards = set(backend.names("samples"))
            self._whole_shards: set[str] = set()
        except BaseException:
            self._lease.release()
            raise

    @property
    def url(self) -> str:
        return self.backend.url

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        identity: Identity,
        *,
        run: str = "run",
        share: Share | None = None,
        final_norm: FinalNorm | None = None,
        wait_s: float = 0.0,
        staging_dir: Path | None = None,
    ) -> "Store":
        """Create the store, or open it for writing.

        Args:
            url: Local path, ``file://`` or object store URL such as ``s3://bucket/prefix``.
            identity: What the samples of the store have in common.
            run: Name of the run, for provenance and for whoever finds the store busy.
            share: Write together with the other shares of its group; alone when absent.
            final_norm: Stored on creation, and again where its files are found missing or altered.
            wait_s: How long to wait for another run to let go of the store.
            staging_dir: Where to stage for an object store; needs room for the samples that are extracted but not
                yet committed. The system's temporary directory by default. A local store stages inside itself.

        Raises:
            IdentityMismatch: the store, or what is there of one that lost its root group, holds another extraction;
                says which fields differ, and both values.
            StoreBusy: another run is writing to it.
            StorageFailure: the place cannot be written to.
            NotAStore: something else is there.
            DamagedStore: the store's manifest is lost, and a share, which is not alone with the store, cannot rebuild
                it; or its root group was altered.
        """
        for name in (run, *((share.group, share.name) if share else ())):
            if not _SAFE_RUN.fullmatch(name):
                raise ValueError(f"run name {name!r} must be letters, digits, '.', '_' and '-'")
        backend = open_backend(url, staging_dir)
        try:
            _refuse_other(backend, identity)
        except (NotAStore, DamagedStore):
            names = set(backend.names(""))
            if RECORD in names:
                raise
            # A run that died while it created the store has left the private directory, and some of these. Samples may
            # have lost all else, or been moved here.
            is_ours = PRIVATE in names or any(recorded(backend))
            if names and not (is_ours and names <= {PRIVATE, "samples", WEIGHT}):
                raise NotAStore(
                    f"{backend.url} is not empty, and no store: name a new or an empty directory for the store"
                ) from None
        deadline = time.monotonic() + wait_s
        while True:
            try:
                store = cls(backend, identity, run, share)
                break
            except StoreBusy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(1.0, max(0.01, deadline - time.monotonic())))
        try:
            store._create(final_norm)
            store._see_to_manifest()
            if final_norm is not None:
                store._see_to_final_norm(final_norm)
        except BaseException:
            store.close()
            raise
        return store

    def _create(self, final_norm: FinalNorm | None) -> None:
        if RECORD in self.backend.names(""):
            _refuse_other(self.backend, self.identity)
            keep_root(self.backend, self.identity)
            return
        refuse_mixture(self.backend, self.identity)
        documents = {
            # An array keeps readers that walk the hierarchy out of this directory, without a warning.
            f"{PRIVATE}/{path}": data
            for path, data in layout.array_documents(
                np.zeros(0, dtype=np.uint8), ["nothing"], {"purpose": "bookkeeping of the store; not data"}
            ).items()
        }
        attributes: dict[str, Any] = {
            "format": FORMAT,
            "layout": layout.LAYOUT,
            "identity": asdict(self.identity),
            "identity_digest": self.identity.digest,
            "logical_dtype": self.identity.dtype,
            "chunk_tokens": self.spec.chunk_tokens,
            "codecs": self.spec.templates(1).codecs,
            "created": _now(),
        }
        if final_norm is not None:
            attributes["final_norm"] = {"kind": final_norm.kind, "eps": final_norm.eps, "weight": WEIGHT}
            documents |= weight_documents(final_norm.weight)
        documents[f"samples/{RECORD}"] = layout.group_document()
        root = layout.root_document(attributes)
        documents[COPY] = layout.seal(root)
        self.backend.put_all(documents)
        self.backend.put(RECORD, root)

    def _see_to_manifest(self) -> None:
        """Begin the manifest of a new store, and rebuild one that is damaged, so that it lists all that is there."""
        if not self.manifest.segments:
            self.manifest.load()  # another share may have begun it since
        if not self.manifest.segments and not self.manifest.problems:
            self.manifest.begin()
        if not self.manifest.problems:
            return
        if self.share is None:
            self.rebuilt = self.rebuild_manifest()
        elif not self.manifest.segments:
            # What a share adds would pass for the whole manifest.
            self.manifest.require_whole()

    def rebuild_manifest(self, *, workers: int = 8, progress: Progress | None = None) -> Rebuilt:
        """Let the manifest list the samples that are there whole; only for a run that is alone with the store."""
        with self._lock:
            return rebuild(self.backend, self.identity, self.manifest, workers=workers, progress=progress)

    def _see_to_final_norm(self, given: FinalNorm) -> None:
        """Write the norm's weight again where its files are not what was written."""
        attributes = describe(self.backend)
        if attributes.get("final_norm") is None:
            return
        if final_norm_problem(self.backend, attributes) is None:
            stored = load_final_norm(self.backend, attributes)
            if stored is not None and np.array_equal(stored.weight, np.asarray(given.weight, dtype=np.float32)):
                return
        self.backend.put_all(weight_documents(given.weight))

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write to the store, and drop what is staged.

        A commit that another thread has begun ends first; a later one is refused.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            try:
                if self._staging is not None:
                    self.backend.drop_staging(self._staging)
                    self._staging = None
                if not closed:
                    # All is recorded by now; where no note can be made, that of the run before stays true.
                    with contextlib.suppress(StoreError, OSError):
                        self._lease.check()
                        self.manifest.note()
            finally:
                self._lease.release()

    # --- what is there

    def missing(self, planned: Iterable[tuple[str, int]]) -> list[str]:
        """Keys, in the order given, of samples that are not in the store whole.

        A sample counts as present if it is committed with this length and all its files have the sizes that were
        committed. The manifest says what to look for; a key it does not list is looked up in the store itself. Of
        more than 5,000 samples in an object store, where a file is whole or absent, only the presence is checked.

        Args:
            planned: (key, tokens) of each sample.
        """
        lengths = dict(planned)
        with self._lock:
            entries = {**self.manifest.entries, **self._pending.entries}
        doubtful = {key for key, n in lengths.items() if key not in entries or entries[key].num_tokens != n}
        doubtful.update(
            self.backend.incomplete(
                (key, self.spec.files(num_tokens), entries[key].sizes)
                for key, num_tokens in lengths.items()
                if key not in doubtful
            )
        )
        return [key for key, n in lengths.items() if key in doubtful and not self._adopt(key, n)]

    def look_again(self) -> None:
        """Take notice of places that others have begun to write to since this store was opened."""
        self._shards |= set(self.backend.names("samples"))

    def _adopt(self, key: str, num_tokens: int) -> bool:
        """Take up a whole sample that the manifest does not list, since a run died before it wrote that."""
        if key[:2] not in self._shards:
            return False
        try:
            record = probe(self.backend, key, self.identity)
        except (FileNotFoundError, DamagedSample):
            return False
        if record.num_tokens != num_tokens:
            return False
        with self._lock:
            self._pending.entries[key] = Entry.of(record)
        return True

    # --- stage, commit, record

    def staging(self) -> Path:
        """Directory to stage samples in; the same for the whole run, removed when the store is closed."""
        with self._lock:
            if self._closed:
                raise StoreError(f"{self.url} was closed; open it again to write")
            if self._staging is None:
                self._staging = self.backend.staging(self.run)
            return self._staging

    def stage_spec(self, links: bool = True) -> dict[str, Any]:
        """What :func:`tasks.store.stage.stage_states` needs to know of the store, in plain values.

        Args:
            links: Whether samples share equal chunks, where the place has hard links.
        """
        spec = self.spec.to_dict()
        if links and self.backend.links is not None:
            spec["links"] = str(self.backend.links.directory)
        return spec

    def commit(self, samples: Sequence[StagedSample]) -> list[str]:
        """Make staged samples visible, each in one step; returns the keys that this call committed.

        A commit outlives the death of the process at once, and a loss of power as soon as :meth:`record` returns.

        A key that is in the store already, whole, stays as it is. A damaged one is set aside first.

        Raises:
            StoreError: a staged file is missing or has another size than its receipt says; nothing is committed. Or
                the store was closed.
            StorageFailure: disk full, read-only and the like. Samples already committed stay; the same call can be made
                again.
        """
        if not samples:
            return []
        with self._lock:
            staging = self.staging()
            self._lease.check()
            fresh = [sample for sample in samples if self._make_way(sample)]
            for sample in fresh:
                self._check_staged(staging, sample)
            self._ensure_shards({sample.key[:2] for sample in fresh})
            publications = [self._finish(staging, sample) for sample in fresh]
            committed = []
            for publication, won in zip(publications, self.backend.publish(publications), strict=True):
                if won:
                    committed.append(publication.key)
                    self._pending.entries[publication.key] = Entry.of(
                        layout.parse_record(publication.record, self.spec)
                    )
                    self._release(publication.key)
            for key in {sample.key for sample in samples} - {sample.key for sample in fresh}:
                shutil.rmtree(staging / key, ignore_errors=True)
                self._release(key)
            self.committed += len(committed)
        return committed

    def _check_staged(self, staging: Path, sample: StagedSample) -> None:
        paths = self.spec.staged_files(sample.num_tokens)
        if set(sample.objects) != set(paths):
            raise StoreError(f"sample {sample.key}: the staged files are {sorted(sample.objects)}, not {sorted(paths)}")
        for path in paths:
            try:
                size = os.stat(f"{staging}/{layout.check_key(sample.key)}/{path}").st_size  # noqa: PTH116
            except FileNotFoundError:
                raise StoreError(f"sample {sample.key}: staged file {path} is missing") from None
            if size != sample.objects[path][0]:
                raise StoreError(
                    f"sample {sample.key}: staged file {path} has {size} bytes instead of {sample.objects[path][0]}"
                )
        if np.shape(sample.loss_mask) != (sample.num_tokens,):
            raise ValueError(
                f"sample {sample.key}: the loss mask has shape {np.shape(sample.loss_mask)}, not ({sample.num_tokens},)"
            )

    def _make_way(self, sample: StagedSample) -> bool:
        """Whether the key is free to commit to."""
        try:
            record = probe(self.backend, sample.key, self.identity)
        except FileNotFoundError:
            leftovers = bool(self.backend.sizes(sample_path(sample.key)))
        except DamagedSample:
            leftovers = True
        else:
            self._pending.entries.setdefault(sample.key, Entry.of(record))
            return False
        if leftovers:
            self.backend.set_aside(sample.key)
        return True

    def _finish(self, staging: Path, sample: StagedSample) -> Publication:
        """Write the loss mask beside the staged files, and make the completion record."""
        directory = staging / sample.key
        templates = self.spec.templates(sample.num_tokens)
        mask_T = np.asarray(sample.loss_mask, dtype=np.bool_)
        objects = {path: sample.objects[path] for path in self.spec.staged_files(sample.num_tokens)}
        with storage_failures(directory):
            os.makedirs(f"{directory}/loss_mask", exist_ok=True)  # noqa: PTH103
            for path, data in (
                ("loss_mask/zarr.json", templates.array("loss_mask", sample.num_tokens)),
                ("loss_mask/c.0", layout.seal(mask_T.astype(np.int8).tobytes())),
            ):
                objects[path] = write_file(f"{directory}/{path}", data)
        attributes: dict[str, Any] = {
            "layout": layout.LAYOUT,
            "key": sample.key,
            "identity": self.identity.digest,
            "num_tokens": sample.num_tokens,
            "depths": self.identity.depths,
            "dtype": self.identity.dtype,
            "stored_as": self.identity.stored_as,
            "next_token": sample.next_token,
            "sources": _own_spans(sample.sources, mask_T),
            "mask": layout.mask_digest(mask_T),
            "run": self.run,
            "capture": sample.capture,
            "objects": objects,
        }
        if self.spec.is_fp8:
            error_L2 = np.frombuffer((directory / "quantization_error/c.0.0").read_bytes()[:-4], dtype="<f4")
            attributes["quantization_error"] = [float(f"{mean:.3g}") for mean in error_L2[::2]]
        return Publication(directory, sample.key, objects, templates.record(sample.num_tokens, attributes))

    def _ensure_shards(self, shards: set[str]) -> None:
        """See to the groups between ``samples`` and a sample. A run may have died after making their directories."""
        paths = [f"samples/{shard}/{RECORD}" for shard in sorted(shards - self._whole_shards)]
        found = zip(paths, self.backend.read_all(paths), strict=True)
        absent = [path for path, document in found if not layout.is_group(document)]
        if absent:
            self.backend.put_all(dict.fromkeys(absent, layout.group_document()))
        self._shards |= shards
        self._whole_shards |= shards

    def record(self, sources: Iterable[SourceRecord] = ()) -> None:
        """List in the manifest what was committed since the last call, and which sources share which samples.

        Sources that are recorded already with the same key and mask cost nothing, so a rerun may pass them all.

        Raises:
            KeyError: a source's sample is not in the store.
        """
        with self._lock:
            self._lease.check()
            batch = Batch(dict(self._pending.entries))
            for source in sources:
                entry = batch.entries.get(source.key) or self.manifest.entries[source.key]
                own = layout.mask_digest(source.loss_mask) != entry.mask
                recorded = Source(source.key, to_spans(source.loss_mask) if own else None)
                if self.manifest.sources.get(source.source_id) != recorded:
                    batch.sources[source.source_id] = recorded
            self.manifest.append(batch)
            self._pending = Batch()

    def forget(self, keys: Iterable[str]) -> None:
        """Take samples that are no longer in the store out of the manifest; their sources too."""
        gone = set(keys)
        with self._lock:
            self.manifest.entries = {k: entry for k, entry in self.manifest.entries.items() if k not in gone}
            self.manifest.sources = {s: source for s, source in self.manifest.sources.items() if source.key not in gone}
            self.manifest.rewrite()

    # --- what was refused, and provenance

    def quarantine(self, key: str, sources: Sequence[str], reason: str, detail: str, evidence: Any = None) -> None:
        """Note that the verification refused a sample; its staged files are dropped."""
        refused = Quarantined(layout.check_key(key), tuple(sources), reason, detail, evidence, self.run, _now())
        with self._lock:
            self.backend.put(f"{QUARANTINE}/{key}.json", json.dumps(asdict(refused), indent=1, default=str).encode())
            self._quarantined.add(key)
            if self._staging is not None:
                shutil.rmtree(self._staging / key, ignore_errors=True)

    @property
    def quarantined_keys(self) -> set[str]:
        """Keys of the samples that are in quarantine."""
        return set(self._quarantined)

    def _release(self, key: str) -> None:
        if key in self._quarantined:
            self.backend.remove(f"{QUARANTINE}/{key}.json")
            self._quarantined.discard(key)

    def write_failed(self, keys: Iterable[str]) -> None:
        """Note the samples that this run was asked for and did not commit, in place of what the last run noted.

        A share's note is one of several, which stay until a run that is alone with the store writes its own.
        """
        name = f"{self.share.name if self.share else 'run'}.json"
        with self._lock:
            if self.share is None:
                for other in self.backend.names(FAILED):
                    if other != name:
                        self.backend.remove(f"{FAILED}/{other}")
            note = {"run": self.run, "time": _now(), "keys": sorted(keys)}
            self.backend.put(f"{FAILED}/{name}", json.dumps(note).encode())

    def failed(self) -> set[str]:
        """Keys that the last run was asked for and did not commit, and all that are in quarantine."""
        notes = self.backend.read_all([f"{FAILED}/{name}" for name in self.backend.names(FAILED)])
        noted = (key for note in notes if note is not None for key in json.loads(note)["keys"])
        return {*self._quarantined, *noted}

    def write_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Keep what is known of this run, beside versions and hardware, which are added; secrets are blanked.

        What is told later is added to what was told before.
        """
        if self._provenance is None:
            name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self.run}.json"
            self._provenance = name, {"run": self.run, "time": _now(), **environment()}
        name, document = self._provenance
        document |= without_secrets(provenance)
        self.backend.put(f"{RUNS}/{name}", json.dumps(document, indent=1, default=str).encode())


def _own_spans(
    sources: Sequence[str] | Mapping[str, npt.ArrayLike], mask_T: npt.NDArray[np.bool_]
) -> dict[str, Spans | None]:
    if not isinstance(sources, Mapping):
        return dict.fromkeys(sources)
    return {
        source: None if np.array_equal(np.asarray(own, dtype=np.bool_), mask_T) else to_spans(own)
        for source, own in sources.items()
    }


def _refuse_other(backend: Backend, identity: Identity) -> None:
    stored = stored_identity(backend)
    if stored.digest == identity.digest:
        return
    ours, theirs = asdict(identity), asdict(stored)
    differences = "\n".join(
        f"  {name}: the store has {theirs[name]!r}, this run {ours[name]!r}"
        for name in ours
        if ours[name] != theirs[name]
    )
    raise IdentityMismatch(
        f"{backend.url} holds another extraction:\n{differences}\nChoose another store, or make the settings equal"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
