"""One node of a Ray cluster: an engine, and the steps of a chunk, for chunks that come from elsewhere."""

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flows.config import Extraction
from tasks.extract.task import LazyEngine, engine_spec, extract_chunk
from tasks.model import resolve
from tasks.plan.shards import Shard
from tasks.report.picture import Profiles
from tasks.report.progress import Progress
from tasks.report.summary import Outcome
from tasks.samples import Sample, SampleTable, SampleTableWriter
from tasks.store.task import commit_chunk, open_store, record_reused
from tasks.verify.examine import Examiner
from tasks.verify.probe import Probe
from tasks.verify.task import verify_chunk
from tasks.vocabulary import Chunk, Profile, Verdict


@dataclass(frozen=True)
class Parcel:
    """A chunk with its samples, as it travels to a node."""

    chunk: Chunk
    """Its samples' rows count in ``samples``."""
    samples: Sequence[Sample]
    nameless: frozenset[int] = frozenset()
    """As in :class:`tasks.samples.SampleTable`."""
    earlier: Verdict | None = None
    """The verdict on the first attempt, where this is the second."""

    @classmethod
    def pack(cls, chunk: Chunk, table: SampleTable, earlier: Verdict | None = None) -> "Parcel":
        """Take the chunk's missing samples out of a run's table."""
        samples: list[Sample] = []
        nameless: list[int] = []
        missing = []
        for planned in chunk.missing:
            rows = tuple(range(len(samples), len(samples) + len(planned.rows)))
            nameless += [own for own, row in zip(rows, planned.rows, strict=True) if row in table.nameless]
            samples += [table[row] for row in planned.rows]
            missing.append(replace(planned, rows=rows))
        return cls(
            replace(chunk, samples=tuple(missing), missing=tuple(missing)), samples, frozenset(nameless), earlier
        )


class Node:
    """Extracts, verifies and commits chunks on this machine. An actor: several threads may call :meth:`run`."""

    def __init__(self, extraction: dict[str, Any], part: dict[str, Any], run: str) -> None:
        """Open this node's share of the store; the engine starts with the first chunk.

        Args:
            extraction: The configuration, as plain values.
            part: The :class:`tasks.plan.shards.Shard` under which this node writes, as plain values.
            run: Name of this node's part of the run.
        """
        wanted = Extraction.model_validate(extraction)
        checkpoint = resolve(wanted.model)
        identity = wanted.identity(checkpoint)
        self._closing = ExitStack()
        self._scratch = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="layertap-")))
        self._store = self._closing.enter_context(
            open_store(wanted.store, identity, checkpoint, run, Shard.model_validate(part))
        )
        self._engine = self._closing.enter_context(
            LazyEngine(
                engine_spec(checkpoint, identity, wanted.engine, self._store),
                probe=Probe(checkpoint) if wanted.audit.probe else None,
                record=self._store.write_provenance,
            )
        )
        self._first = threading.Lock()
        self._progress = Progress([])
        self._examiner = Examiner(checkpoint, identity, wanted.engine.tensor_parallel_size, wanted.audit)
        self._profiles = Profiles(identity.depths)

    def pid(self) -> int:
        """Process of this node, once it is ready."""
        return os.getpid()

    def run(self, parcel: Parcel, again: bool = False) -> tuple[Outcome, str | None]:
        """Extract, verify and commit one chunk.

        Args:
            parcel: The chunk.
            again: Whether it was begun before, here or on a node that died, and some of its samples may be committed.

        Returns:
            What became of the chunk, and why the run should stop, if it should.
        """
        chunk = parcel.chunk
        path = self._scratch / f"{chunk.name}.arrow"
        with SampleTableWriter(path) as writer:
            writer.add(parcel.samples)
        table = SampleTable(path, parcel.nameless)
        path.unlink()
        if again:
            self._store.look_again()
            missing = set(self._store.missing((s.key, s.num_tokens) for s in chunk.missing))
            chunk = replace(chunk, missing=tuple(s for s in chunk.missing if s.key in missing))
            record_reused([chunk], table, self._store)
            if not missing:
                return _as_committed(parcel.chunk, chunk), None
        suspect = parcel.earlier is not None
        # Nothing beside this engine's first chunk until its values are proved.
        with nullcontext() if self._examiner.gate.is_open else self._first:
            extracted = extract_chunk.fn(chunk, table, self._store, self._engine, self._progress, suspect=suspect)
            verdicts = verify_chunk.fn(
                chunk, extracted.data, table, self._examiner, self._profiles, self._engine.halt, parcel.earlier
            )
        outcome = commit_chunk.fn(chunk, verdicts, table, self._store)
        found = _as_committed(parcel.chunk, chunk)
        total = replace(outcome, extracted=outcome.extracted + found.extracted, tokens=outcome.tokens + found.tokens)
        return total, self._engine.halted

    def profiles(self) -> list[Profile]:
        """How large the states were along some samples, for the run's picture."""
        return self._profiles.kept

    def close(self) -> None:
        """Shut the engine down and let go of the store."""
        self._closing.close()


def _as_committed(planned: Chunk, left: Chunk) -> Outcome:
    """The part of a chunk that another node committed before it died."""
    tokens = sum(s.num_tokens for s in planned.missing) - sum(s.num_tokens for s in left.missing)
    return Outcome(len(planned.missing) - len(left.missing), tokens, 0, 0)
