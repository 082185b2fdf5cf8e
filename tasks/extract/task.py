"""The extraction of one chunk as a Prefect task, and the engine that all chunks of a run share."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineSpec, Job
from tasks.model import Checkpoint
from tasks.report.progress import Progress
from tasks.samples import SampleTable
from tasks.store.stage import STAGE
from tasks.store.store import Store
from tasks.vocabulary import Chunk, Identity, StagingFailure


class Halted(RuntimeError):
    """The run was stopped early; the message says why."""


class LazyEngine:
    """Starts the engine when the first chunk needs it; a run that finds everything in the store never does."""

    def __init__(self, spec: EngineSpec, gate: Callable[[], None] = lambda: None) -> None:
        """Start nothing yet.

        Args:
            spec: of the engine.
            gate: Called before each chunk; returns when it may be begun.
        """
        self.spec = spec
        self._gate = gate
        self.halted: str | None = None
        self._engine: CaptureEngine | None = None
        self._lock = threading.Lock()

    def halt(self, reason: str) -> None:
        """Extract nothing more, since what comes out is wrong."""
        self.halted = self.halted or reason

    def get(self) -> CaptureEngine:
        """The running engine; a new one if there is none or the last one died.

        Raises:
            Halted: it was told to extract nothing more.
        """
        self._gate()
        if self.halted:
            raise Halted(self.halted)
        with self._lock:
            if self._engine is None or not self._engine.alive:
                self._engine = CaptureEngine(self.spec)  # known before it has started, so that it can be stopped
                self._engine.start()
            return self._engine

    @property
    def started(self) -> CaptureEngine | None:
        """The engine, if one was started."""
        return self._engine

    def __enter__(self) -> "LazyEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def engine_spec(checkpoint: Checkpoint, identity: Identity, engine: Engine, store: Store) -> EngineSpec:
    """What the engine must be to fill this store."""
    return EngineSpec(checkpoint, identity.depths, identity.dtype, engine, STAGE, store.spec.to_dict(), store.run)


@task(name="extract", task_run_name="extract {chunk.name}", cache_policy=NO_CACHE, persist_result=False)
def extract_chunk(
    chunk: Chunk, table: SampleTable, store: Store, engine: LazyEngine, progress: Progress, suspect: bool = False
) -> Any:
    """Capture and stage the chunk's missing samples; of suspects every rank keeps the values, to be compared.

    Returns:
        A state with the receipts of all ranks by key (list[Receipt]); named Cached when nothing was missing.
    """
    reused = len(chunk.samples) - len(chunk.missing)
    if not chunk.missing:
        return Completed(name="Cached", message=f"{reused}/{reused} verified in store", data={})
    running = engine.get()
    progress.engine_ready()
    job = Job(
        directory=store.staging(),
        samples={sample.key: table[sample.rows[0]].input_ids for sample in chunk.missing},
        on_sample=lambda key, num_tokens: None if suspect else progress.advance(num_tokens),
        suspect=suspect,
    )
    receipts = running.submit(job).result()
    refused = [r.error for of_sample in receipts.values() for r in of_sample if r.storage_failed]
    if refused:
        raise StagingFailure(refused[0])
    return Completed(message=f"{len(chunk.missing)} extracted, {reused} reused", data=receipts)
