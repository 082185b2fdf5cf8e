"""The extraction of one chunk as a Prefect task, and the engine that all chunks of a run share."""

import contextvars
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from tasks.extract.checks import StartupError
from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineClosed, EngineDied, EngineSpec, Job
from tasks.faults import RETRIES
from tasks.model import Checkpoint
from tasks.report.log import logger
from tasks.report.progress import Progress
from tasks.samples import SampleTable
from tasks.store.stage import STAGE
from tasks.store.store import Store
from tasks.verify.probe import Continuation, Probe
from tasks.vocabulary import Chunk, Identity, StagingFailure

FAILED_STARTS = 3  # in a row, after which the engine is not started again


class Halted(RuntimeError):
    """The run was stopped early; the message says why."""


class LazyEngine:
    """Starts the engine when the first chunk needs it; a run that finds everything in the store never does."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        pause: Callable[[Callable[[], bool]], None] = lambda ended: None,
        probe: Probe | None = None,
        record: Callable[[Mapping[str, Any]], None] = lambda facts: None,
    ) -> None:
        """Make it; nothing is started.

        Args:
            spec: of the engine.
            pause: called before each chunk; returns when it may be begun, or what it is given says that the run ends.
            probe: the sentence that the model is to go on with, if it is trained.
            record: told what is known of an engine once it has started.
        """
        self.spec = spec
        self._pause = pause
        self.halted: str | None = None
        self.continuation: Continuation | None = None
        """What the model went on with."""
        self._probe, self._record = probe, record
        self._engine: CaptureEngine | None = None
        self._failed_starts = 0
        self._closed = False
        self._lock = threading.Lock()
        self._context = contextvars.copy_context()

    def halt(self, reason: str) -> None:
        """Extract nothing more, since what comes out is wrong."""
        self.halted = self.halted or reason

    def get(self) -> CaptureEngine:
        """The running engine; a new one if there is none or the last one died.

        Raises:
            Halted: it was told to extract nothing more.
            StartupError: the engine cannot be started as configured.
            EngineDied: it ended while it was being started.
        """
        self._pause(lambda: self._closed)
        with self._lock:
            if self.halted:
                raise Halted(self.halted)
            if self._closed:
                raise EngineClosed("the run ends")
            if self._engine is None or not self._engine.alive:
                self._restart()
            assert self._engine is not None
            if self.halted:
                raise Halted(self.halted)
            return self._engine

    def _started(self, engine: CaptureEngine) -> None:
        facts: dict[str, Any] = {"engine": engine.facts}
        if self._probe and engine.continuation:
            self.continuation = self._probe.judge(engine.continuation)
            logger.info(f"the model goes on: {self.continuation}")
            facts["probe"] = str(self.continuation)
            if problem := self.continuation.problem:
                self.halt(
                    f"{problem} after a plain sentence ({self.continuation!s:.200}): look at the engine's kernels, "
                    "dtype and quantization; set audit.probe: false if the model is not trained"
                )
        self._record({"started": facts})

    @property
    def recomputed(self) -> int:
        """Samples that were computed again, see :attr:`tasks.extract.engine.CaptureEngine.recomputed`."""
        return self._engine.recomputed if self._engine is not None else 0

    def _restart(self) -> None:
        if self._engine is not None:
            logger.warning("the engine died; starting another")
            self._engine.shutdown()  # the devices must be free before the next one loads
        # In the run's own context: the engine outlives the task that happens to need it first.
        spec = replace(self.spec, probe=self._probe.ids) if self._probe else self.spec
        self._engine = self._context.run(CaptureEngine, spec)
        try:
            self._engine.start()
        except Exception as error:
            self._failed_starts += 1
            if isinstance(error, StartupError) or self._failed_starts == FAILED_STARTS:
                self.halt(f"the engine does not start: {error}")
            if isinstance(error, StartupError):
                raise
            raise EngineDied(f"the engine does not start: {error}") from error
        self._failed_starts = 0
        self._started(self._engine)

    @property
    def started(self) -> CaptureEngine | None:
        """The engine, if one was started."""
        return self._engine

    def __enter__(self) -> "LazyEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        if self._engine is not None:
            self._engine.shutdown()


def engine_spec(
    checkpoint: Checkpoint, identity: Identity, engine: Engine, store: Store, reuse: bool = False
) -> EngineSpec:
    """What the engine must be to fill this store; ``reuse`` if rows of shared prefixes are to be computed once."""
    stage_spec = store.stage_spec(links=reuse)
    return EngineSpec(checkpoint, identity.depths, identity.dtype, engine, STAGE, stage_spec, reuse, owner=store.run)


@task(name="extract", task_run_name="extract {chunk.name}", cache_policy=NO_CACHE, persist_result=False, **RETRIES)
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
        on_sample=lambda key, num_tokens: None if suspect else progress.advance(key, num_tokens),
        suspect=suspect,
        shared={sample.key: sample.shared for sample in chunk.missing},
    )
    receipts = running.submit(job).result()
    refused = [r for of_sample in receipts.values() for r in of_sample if r.storage_failed]
    if refused:
        lasting = any(r.storage_failed == "lasting" for r in refused)
        raise StagingFailure(refused[0].error or "", lasting=lasting)
    return Completed(message=f"{len(chunk.missing)} extracted, {reused} reused", data=receipts)
