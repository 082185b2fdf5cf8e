"""The manifest: an index of what is committed, and which source ids share which sample.

It is a log of batches. A batch is one line, ``<crc32c, 8 hex digits> <JSON>``, in a segment file of its own that
is written last, after the samples it lists are committed; nothing in a segment is ever changed. Segments are
read in the order of their names, and the latest line about a source id wins. The manifest speeds up what the
samples' completion records say anyway, so it can be rebuilt from them.

A segment appears whole or not at all, and the first one, without samples, is there before any sample is. So a writer
that dies leaves samples that are not listed yet, but never a torn line, a gap in the segments' numbers, or samples
beside no segment: those are damage, and what is read then is not taken for the whole. A line marked ``whole`` says all
there is; it makes earlier ones void, so that those may go.

That the last segments are all there cannot be told by their numbers. So a run that ends notes, in a file of its own,
which segments there are by then; until it does, they were either noted before or are those of a run that died.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from tasks.store.backend import Backend, Files
from tasks.store.errors import DamagedStore
from tasks.store.layout import PRIVATE, Record, is_key, is_shard

MANIFEST = f"{PRIVATE}/manifest"
NOTED = f"{PRIVATE}/manifest.json"
"""Names of the segments with samples that there were when a run ended."""
_FIRST = "00000000-created.jsonl"
_SEGMENT = re.compile(r"(\d+)-.*\.jsonl")
_SEGMENTS_BEFORE_MERGE = 256
_ATTEMPTS = 5

Spans = tuple[int, ...]
"""A loss mask as starts and ends of its supervised stretches: (s0, e0, s1, e1, ...)."""


def to_spans(loss_mask: npt.ArrayLike) -> Spans:
    mask_T = np.asarray(loss_mask, dtype=np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask_T, [False])).astype(np.int8)))
    return tuple(edges.tolist())


def from_spans(spans: Sequence[int], num_tokens: int) -> npt.NDArray[np.bool_]:
    mask_T = np.zeros(num_tokens, dtype=np.bool_)
    for start, end in zip(spans[::2], spans[1::2], strict=True):
        mask_T[start:end] = True
    return mask_T


class Entry(NamedTuple):
    """A committed sample as the manifest lists it."""

    num_tokens: int
    sizes: tuple[int, ...]
    """Bytes of the sample's files in the order of the layout, the completion record last."""
    mask: str
    """Digest of the loss mask in the sample's group."""
    error: tuple[float, ...] | None = None
    """Per depth the mean relative error of a row, with fp8."""

    @classmethod
    def of(cls, record: Record) -> "Entry":
        return cls(record.num_tokens, record.sizes, record.mask, record.quantization_error)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class Source(NamedTuple):
    """A conversation of the user's data and the sample that holds its tokens."""

    key: str
    spans: Spans | None = None
    """Its loss mask where that differs from the group's."""


@dataclass
class Batch:
    """What one line adds."""

    entries: dict[str, Entry] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    whole: bool = False
    """Whether it says all there is, and earlier lines are void."""

    def to_line(self) -> bytes:
        columns: dict[str, Any] = {
            "samples": {
                "key": list(self.entries),
                "num_tokens": [e.num_tokens for e in self.entries.values()],
                "sizes": [e.sizes for e in self.entries.values()],
                "mask": [e.mask for e in self.entries.values()],
            },
            "sources": {
                "id": list(self.sources),
                "key": [s.key for s in self.sources.values()],
                "mask": [s.spans for s in self.sources.values()],
            },
        }
        if any(e.error for e in self.entries.values()):
            columns["samples"]["error"] = [e.error for e in self.entries.values()]
        if self.whole:
            columns["whole"] = True
        content = json.dumps(columns, separators=(",", ":")).encode()
        return f"{google_crc32c.value(content):08x} ".encode() + content + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Batch":
        """Parse a line; ValueError where it is torn or altered."""
        checksum, _, content = line.rstrip(b"\n").partition(b" ")
        if f"{google_crc32c.value(content):08x}".encode() != checksum:
            raise ValueError("a manifest line does not match its checksum")
        columns: dict[str, Any] = json.loads(content)
        samples, sources = columns["samples"], columns["sources"]
        errors = samples.get("error") or [None] * len(samples["key"])
        return cls(
            dict(
                zip(
                    samples["key"],
                    map(Entry, samples["num_tokens"], map(tuple, samples["sizes"]), samples["mask"], errors),
                    strict=True,
                )
            ),
            {
                source: Source(key, None if spans is None else tuple(spans))
                for source, key, spans in zip(sources["id"], sources["key"], sources["mask"], strict=True)
            },
            columns.get("whole", False),
        )


class Manifest:
    """The manifest in memory."""

    def __init__(self, files: Files) -> None:
        """Read all segments."""
        self._files = files
        self.entries: dict[str, Entry] = {}
        self.sources: dict[str, Source] = {}
        self.problems: list[str] = []
        """What is torn, altered or lost; what the other lines say is kept."""
        self.segments: list[str] = []
        self.noted: list[str] = []
        self.load()

    def load(self) -> None:
        """Read all segments again."""
        for attempt in range(1, _ATTEMPTS + 1):
            # A writer may add and merge segments between the listing and the read, or while they are listed.
            try:
                self._load()
            except FileNotFoundError:
                if attempt == _ATTEMPTS:
                    raise
                continue
            if not self.problems:
                return

    def _load(self) -> None:
        # Before the listing, so that a segment noted meanwhile is not missed in it.
        (note,) = self._files.read_all([NOTED])
        self.segments = [name for name in self._files.names(MANIFEST) if _SEGMENT.fullmatch(name)]
        self.entries, self.sources, self.problems = {}, {}, []
        contents = self._files.read_all([f"{MANIFEST}/{name}" for name in self.segments])
        last, whole = 0, ""
        for name, content in zip(self.segments, contents, strict=True):
            if content is None:
                raise FileNotFoundError(name)
            number = _number(name)
            if number > last + 1:
                self.problems.append(f"manifest segments between number {last} and {number} are missing")
            last = number
            lines = list(filter(None, content.split(b"\n")))
            if not lines:
                self.problems.append(f"manifest segment {name} is empty")
            for line in lines:
                try:
                    batch = Batch.from_line(line)
                except ValueError:
                    self.problems.append(f"a line of manifest segment {name} is torn or altered")
                    continue
                if batch.whole:
                    self.entries, self.sources, self.problems, whole = {}, {}, [], name
                self.entries.update(batch.entries)
                self.sources.update(batch.sources)
        try:
            self.noted = [] if note is None else _names_in(note)
        except ValueError:
            self.noted = []
            self.problems.append(f"{NOTED}, which names the manifest's segments, is altered")
        lost = sorted(name for name in set(self.noted).difference(self.segments) if name > whole)
        if self.problems:
            return
        if lost:
            self.problems.append(f"manifest segments that a finished run wrote are missing: {', '.join(lost)}")
        elif not self.segments and next(keys_present(self._files), None) is not None:
            self.problems.append("there are samples, but no manifest")

    def require_whole(self) -> "Manifest":
        """Raise :class:`DamagedStore` where it does not list all that was recorded; else return the manifest."""
        if self.problems:
            raise DamagedStore(
                f"{self._files.url} may hold more samples than its manifest lists: {'; '.join(self.problems)}. "
                f"`layertap repair {self._files.url}` rebuilds the manifest from the samples"
            )
        return self


def keys_present(files: Files) -> Iterator[str]:
    """Keys that have a directory, committed or not."""
    for shard in files.names("samples"):
        if is_shard(shard):
            yield from filter(is_key, files.names(f"samples/{shard}"))


def _names_in(note: bytes) -> list[str]:
    """Names of segments in a note; ValueError where it is none."""
    names = json.loads(note)
    if not (isinstance(names, list) and all(isinstance(name, str) and _SEGMENT.fullmatch(name) for name in names)):
        raise ValueError("not a list of segments")
    return names


def _number(segment: str) -> int:
    return int(segment.split("-")[0])


class ManifestWriter(Manifest):
    """The manifest of a run that may add to it: the only one, or one of those that share the store."""

    def __init__(self, backend: Backend, run: str, *, alone: bool = True) -> None:
        """Read all segments; merge them if they are many and nobody else adds to them.

        Args:
            backend: of the store.
            run: Part of the names of the segments that are added; no other run that writes now may have it.
            alone: Whether this is the only run that writes.
        """
        super().__init__(backend)
        self._backend = backend
        self._run = run
        # Beyond those that were lost, too: in the place of one of them, a segment would hide that.
        self._next = 1 + max(map(_number, [*self.segments, *self.noted]), default=0)
        if alone and len(self.segments) >= _SEGMENTS_BEFORE_MERGE and not self.problems:
            self.rewrite()

    def begin(self) -> None:
        """Write the first segment; to be called before the first sample is committed."""
        self._backend.put(f"{MANIFEST}/{_FIRST}", Batch(whole=True).to_line())
        self.segments.append(_FIRST)

    def append(self, batch: Batch) -> None:
        """Write a batch as a new segment; it counts when this returns."""
        if not (batch.entries or batch.sources or batch.whole):
            return
        name = f"{self._next:08d}-{self._run}.jsonl"
        self._backend.put(f"{MANIFEST}/{name}", batch.to_line())
        self._next += 1
        self.segments.append(name)
        self.entries.update(batch.entries)
        self.sources.update(batch.sources)

    def note(self) -> None:
        """Note which segments there are; to be called when the run ends."""
        if self.problems:  # a note of what is left would hide the loss
            return
        present = {*filter(_SEGMENT.fullmatch, self._backend.names(MANIFEST)), *self.segments}
        names = sorted(present - {_FIRST})  # which lists nothing
        if names != self.noted:
            self._backend.put(NOTED, json.dumps(names).encode())
            self.noted = names

    def rewrite(self) -> None:
        """Replace all segments by one that says what is in memory."""
        old, self.segments = self.segments, []
        self.append(Batch(self.entries, self.sources, whole=True))
        for name in old:
            self._backend.remove(f"{MANIFEST}/{name}")
        self.problems = []
