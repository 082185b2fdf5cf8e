"""The vLLM engine with the capture inside, as one object that takes jobs and gives receipts.

All calls into vLLM happen on one thread that lives as long as the engine; callers on any thread submit jobs and
wait for their futures. While one job's last samples are still being written, the next job's are being computed.
"""

import os
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tasks.digest import differing_rows
from tasks.extract.capture import OWNER_VARIABLE
from tasks.extract.checks import StartupError, vllm_version
from tasks.extract.config import Engine
from tasks.extract.devices import Devices, engine_devices
from tasks.model import Checkpoint
from tasks.verify.diagnose import Expected, explain
from tasks.vocabulary import DType, Receipt, RowEvidence, digest_ids

POLL_SECONDS = 0.02  # how often receipts that are still being written are asked for
ADMIT_STEPS = 4  # samples for this many engine steps are kept waiting inside the engine
EVIDENCE_ROWS = 32  # rows of a sample whose values are compared where ranks disagree

#: vLLM's workers with the capture, by platform.
WORKERS = {
    "cpu": "tasks.extract.cpu_worker.CpuCaptureWorker",
    "gpu": "tasks.extract.gpu_worker.GpuCaptureWorker",
}


class EngineDied(RuntimeError):
    """The engine's process ended or stopped answering; what was not committed must be extracted again."""


class CaptureBroken(StartupError):
    """The engine runs, but what the capture reads from it is not what it should be."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that distinguishes one running engine from another."""

    checkpoint: Checkpoint
    depths: tuple[int, ...]
    """Depths k of r_k, ascending."""
    dtype: DType
    engine: Engine
    stage: str
    """The function that stages a sample, as ``package.module:function`` (see :data:`tasks.extract.writer.Stage`)."""
    stage_spec: Mapping[str, Any]
    """What that function needs to know of the store; plain values."""
    owner: str = "another run"
    """Name of the run, for those that wait for the engine's devices."""


@dataclass(eq=False)
class Job:
    """Samples to extract together; the future gives their receipts, by key and rank."""

    directory: Path
    """Where the samples are staged."""
    samples: Mapping[str, npt.NDArray[np.int32]]
    """Key -> token ids [T]."""
    on_sample: Callable[[str, int], None] = lambda key, num_tokens: None
    """Called on the engine's thread with each sample the engine has finished, and its tokens."""
    suspect: bool = False
    """Whether every rank keeps the samples' values, to be compared where ranks disagree; it runs by itself."""
    receipts: Future[dict[str, list[Receipt]]] = field(default_factory=Future)
    _next_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def _computed(self) -> bool:
        return len(self._next_tokens) == len(self.samples)


class CaptureEngine:
    """A running engine. Start it with :meth:`start`; it must be shut down.

    Raises (from :meth:`start`):
        StartupError: vLLM refused the configuration.
        CaptureBroken: the probe samples did not come back as they should.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.ranks: list[dict[str, Any]] = []
        """What each rank says of itself, see :meth:`tasks.extract.capture.CaptureMixin.layertap_open`."""
        self.waits: list[dict[str, float]] = []
        """Per rank, seconds that the engine waited for the copy and for the writers; known after shutdown."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._stopping = threading.Event()
        self._dead: BaseException | None = None
        self._devices = Devices(spec.owner)
        self._thread = threading.Thread(target=self._run, name="layertap-engine", daemon=True)

    def start(self) -> Self:
        """Load the model and prove the capture on probe samples; returns when the engine is ready."""
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.shutdown()
            raise
        return self

    @property
    def alive(self) -> bool:
        return self._dead is None and not self._stopping.is_set()

    def submit(self, job: Job) -> Future[dict[str, list[Receipt]]]:
        """Queue a job; its future fails with :class:`EngineDied` when the engine ends before the job does."""
        if not self.alive:
            job.receipts.set_exception(EngineDied("the engine is not running"))
        else:
            self._jobs.put(job)
        return job.receipts

    def shutdown(self) -> None:
        """End the engine and its processes; jobs that are not finished fail. Safe to call twice."""
        self._stopping.set()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._devices.release()

    # Everything below runs on the engine's own thread.

    def _run(self) -> None:
        vllm_engine = None
        active: list[Job] = []
        try:
            vllm_engine = self._load()
            self._probe(vllm_engine)
            self._started.set_result(None)
            self._serve(vllm_engine, active)
        except BaseException as error:
            self._dead = error
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._stopping.set()
            if vllm_engine is not None:
                self._unload(vllm_engine)
            self._devices.release()
            self._fail(active)

    def _fail(self, active: list[Job]) -> None:
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                active.append(job)
        for job in active:
            if not job.receipts.done():
                cause = self._dead
                error = EngineDied(f"the engine ended: {cause}" if cause else "the engine was shut down")
                error.__cause__ = cause
                job.receipts.set_exception(error)

    def _load(self) -> Any:
        spec, engine = self.spec, self.spec.engine
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if engine.in_process else "1"
        # The flow has threads; a forked child could inherit a lock that one of them holds.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        visible = os.environ.get(current_platform.device_control_env_var)
        if not self._devices.take(engine_devices(engine.tensor_parallel_size, visible, on_cpu), self._stopping):
            raise EngineDied("the engine was shut down while it waited for its devices")
        arguments: dict[str, Any] = {
            "model": str(spec.checkpoint.path),
            "trust_remote_code": spec.checkpoint.trust_remote_code,
            "dtype": spec.dtype,
            "tensor_parallel_size": engine.tensor_parallel_size,
            "max_model_len": engine.max_model_len,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_num_seqs": engine.max_num_seqs,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "enforce_eager": engine.enforce_eager,
            "quantization": engine.quantization,
            "kv_cache_dtype": engine.kv_cache_dtype,
            "load_format": engine.load_format,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
            # A part of vLLM's compile hash: without the depths, a graph compiled for others would be loaded.
            "additional_config": {"layertap": {"depths": list(spec.depths)}},
            "worker_cls": WORKERS["cpu" if on_cpu else "gpu"],
            **engine.extra,
        }
        if engine.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
        if "vision_config" in spec.checkpoint.config:
            arguments.setdefault("limit_mm_per_prompt", {"image": 0, "video": 0, "vision_chunk": 0})
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
            arguments["distributed_executor_backend"] = "mp" if engine.tensor_parallel_size > 1 else "uni"
            # vLLM's rotary kernel for CPUs misreads the queries of MLA models; the PyTorch form is right.
            arguments.setdefault("compilation_config", {"custom_ops": ["all", "-rotary_embedding"]})

        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            vllm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (TypeError, ValueError) as error:
            raise StartupError(f"vLLM {vllm_version()} refused the engine's arguments: {error}") from error
        writers = engine.tensor_parallel_size if engine.writing_ranks == "all" else 1
        self.ranks = vllm_engine.collective_rpc(
            "layertap_open",
            args=(
                spec.stage,
                dict(spec.stage_spec),
                -(-engine.writer_threads // writers),
                int(engine.staging_gib * 2**30) // writers,
                engine.ring_slots,
                writers > 1,
            ),
        )
        return vllm_engine

    def _unload(self, vllm_engine: Any) -> None:
        try:
            if self._dead is None:
                self.waits = vllm_engine.collective_rpc("layertap_close")
        finally:
            vllm_engine.engine_core.shutdown()
            if self.spec.engine.in_process:
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()

    def _probe(self, vllm_engine: Any) -> None:
        """Run two small samples through the whole way, so that a capture that no longer fits vLLM fails here."""
        spec = self.spec
        for rank, told in enumerate(self.ranks):
            found = (told["rank"], told["world_size"], told["hidden_size"], told["dtype"])
            expected = (rank, spec.engine.tensor_parallel_size, spec.checkpoint.hidden_size, spec.dtype)
            if found != expected:
                raise CaptureBroken(f"rank {rank} is {found}, expected {expected} (rank, TP size, hidden size, dtype)")
        vocab_size = spec.checkpoint.vocab_size
        samples = {f"{n:064x}": np.arange(1, n + 1, dtype=np.int32) % vocab_size for n in (2, 3)}
        with tempfile.TemporaryDirectory(prefix="layertap-probe-") as directory:
            job = Job(Path(directory), samples)
            self._serve(vllm_engine, [job], until_done=True)
        for key, receipts in job.receipts.result().items():
            shape = (len(spec.depths), len(samples[key]), spec.checkpoint.hidden_size)
            for receipt in receipts:
                problem = receipt.error
                if problem is None and receipt.shape != shape:
                    wanted = Expected(shape[0], shape[2], (shape[1],), receipt.world_size, spec.checkpoint.num_layers)
                    likely = explain([tuple(receipt.shape)], wanted)
                    problem = f"shape {list(receipt.shape)}, expected {list(shape)}: {likely}"
                if problem is None and receipt.dtype != spec.dtype:
                    problem = f"element type {receipt.dtype}, expected {spec.dtype}"
                if problem is None and any(receipt.unlike_rows or ()):
                    problem = f"rows differ from what the decoder layers are given, by depth: {receipt.unlike_rows}"
                if problem is None and receipt.ids_digest != digest_ids(samples[key]):
                    problem = "the captured rows are not those of the sample's tokens"
                if problem is None and len(set(receipt.digests)) != len(receipt.digests):
                    problem = "two depths hold the same states"
                if problem is not None:
                    raise CaptureBroken(
                        f"the capture does not work with vLLM {vllm_version()} and {spec.checkpoint.architecture}: "
                        f"a probe of {len(samples[key])} tokens came back from rank {receipt.rank} with: {problem}"
                    )

    def _serve(self, vllm_engine: Any, active: list[Job], *, until_done: bool = False) -> None:
        admitted = 0
        owner: dict[str, Job] = {}
        while not self._stopping.is_set():
            running = bool(owner)
            if not until_done:
                self._take_jobs(active, wait=POLL_SECONDS if active and not running else None if not active else 0)
                if self._stopping.is_set():
                    return
            ahead = ADMIT_STEPS * self.spec.engine.max_num_batched_tokens
            while admitted < len(active) and sum(len(owner[k].samples[k]) for k in owner) < ahead:
                if owner and (active[admitted].suspect or any(job.suspect for job in owner.values())):
                    break
                self._admit(vllm_engine, active[admitted], owner)
                admitted += 1
            if owner:
                for output in vllm_engine.step():
                    if output.finished:
                        job = owner.pop(output.request_id)
                        job._next_tokens[output.request_id] = int(output.outputs[0].token_ids[0])
                        job.on_sample(output.request_id, len(job.samples[output.request_id]))
            for job in [j for j in active[:admitted] if j._computed]:
                if self._collect(vllm_engine, job):
                    active.remove(job)
                    admitted -= 1
            if until_done and not active:
                return

    def _take_jobs(self, active: list[Job], *, wait: float | None) -> None:
        """Move queued jobs to ``active``; wait for the first as long as given, for ever if None."""
        try:
            block = wait is None or wait > 0
            while (job := self._jobs.get(block=block, timeout=wait or None)) is not None:
                active.append(job)
                block = False
        except queue.Empty:
            pass

    def _admit(self, vllm_engine: Any, job: Job, owner: dict[str, Job]) -> None:
        from vllm import SamplingParams

        vllm_engine.collective_rpc(
            "layertap_expect",
            args=(str(job.directory), {key: len(ids) for key, ids in job.samples.items()}, job.suspect),
        )
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for key, ids in job.samples.items():
            vllm_engine.add_request(key, {"prompt_token_ids": ids.tolist()}, parameters)
            owner[key] = job

    def _collect(self, vllm_engine: Any, job: Job) -> bool:
        keys = list(job.samples)
        by_rank = vllm_engine.collective_rpc("layertap_collect", args=(keys,))
        if any(receipts is None for receipts in by_rank):
            return False
        receipts: dict[str, list[Receipt]] = {key: [] for key in keys}
        for of_rank in by_rank:
            for values in of_rank:
                receipt = replace(Receipt.from_dict(values), next_token=job._next_tokens[values["key"]])
                receipts[receipt.key].append(receipt)
        for key, of_sample in receipts.items():
            if len({receipt.digests for receipt in of_sample}) > 1:
                receipts[key] = self._with_evidence(vllm_engine, of_sample)
        vllm_engine.collective_rpc("layertap_release", args=(keys,))
        job.receipts.set_result(receipts)
        return True

    def _with_evidence(self, vllm_engine: Any, receipts: list[Receipt]) -> list[Receipt]:
        """Fetch what the ranks know of single rows, since they disagree."""
        key, num_depths = receipts[0].key, len(self.spec.depths)

        def fetch(rows: list[int]) -> list[RowEvidence]:
            found = vllm_engine.collective_rpc("layertap_evidence", args=(key, rows))
            return [RowEvidence(each["digests"], tuple(each["rows"]), each["values"]) for each in found]

        digests_TL = [np.frombuffer(e.digests, "<i8").reshape(-1, num_depths) for e in fetch([])]
        differ_T = differing_rows(digests_TL).any(axis=1)
        rows = np.flatnonzero(differ_T)[:EVIDENCE_ROWS].tolist()
        return [replace(receipt, evidence=evidence) for receipt, evidence in zip(receipts, fetch(rows), strict=True)]
