"""The vLLM engine with the capture inside, as one object that takes jobs and gives receipts.

All calls into vLLM happen on one thread that lives as long as the engine; callers on any thread submit jobs and
wait for their futures. While one job's last samples are still being written, the next job's are being computed.
"""

import atexit
import contextvars
import gc
import itertools
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tasks.digest import differing_rows
from tasks.extract.assembly import CaptureSettings
from tasks.extract.capture import OWNER_VARIABLE
from tasks.extract.checks import DEEPSEEK, StartupError, check_gpus, vllm_version
from tasks.extract.config import Engine
from tasks.extract.deal import Deal
from tasks.extract.devices import Devices, engine_devices
from tasks.extract.logs import Receiver, others_kept
from tasks.extract.preflight import fitted, look
from tasks.extract.receipts import Inbox
from tasks.faults import PassingFault
from tasks.model import Checkpoint
from tasks.prefixes import prefix_names
from tasks.processes import Process
from tasks.report.log import logger
from tasks.verify.diagnose import Expected, explain
from tasks.vocabulary import DType, Receipt, RowEvidence, digest_ids

POLL_SECONDS = 0.004  # how often receipts that are still being written are asked for
CPU_REUSE_BLOCK = 32  # tokens; a prefix is reused in whole KV blocks, and vLLM makes them 128 on a CPU unless told
SETTLE_SECONDS = 5.0  # after so long a busy engine is asked what became of samples without a receipt
ADMIT_STEPS = 4  # samples for this many engine steps are kept waiting inside the engine
GO_ON_TOKENS = 16  # of the probe
# How long vLLM may take to give the engine's thread back, from the end of the first of its processes.
END_SECONDS, ABANDON_SECONDS = 60.0, 5.0  # in order; after one of them died
LINGER_SECONDS = 1.0  # for which vLLM's processes may go on once there is nothing left for them to do, and are killed
EVIDENCE_ROWS = 32  # rows of a sample whose values are compared where ranks disagree

TRACKER_WARNINGS = "ignore:resource_tracker:UserWarning"

#: vLLM's workers with the capture, by platform.
WORKERS = {
    "cpu": "tasks.extract.cpu_worker.CpuCaptureWorker",
    "gpu": "tasks.extract.gpu_worker.GpuCaptureWorker",
}


class EngineDied(PassingFault):
    """The engine's process ended or stopped answering; what was not committed must be extracted again."""


class EngineClosed(RuntimeError):
    """The engine was shut down before it came to this job; nothing is wrong with it, the run ends."""


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
    reuse: bool = False
    """Whether rows of shared prefixes are computed once, as far as the engine can keep their keys and values."""
    probe: tuple[int, ...] = ()
    """Token ids of a sentence that the model is to go on with when the engine has started; none if empty."""
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
    shared: Mapping[str, int] | None = None
    """Key -> tokens with which samples of this or another job may begin, too; None if that is not known."""
    receipts: Future[dict[str, list[Receipt]]] = field(default_factory=Future)
    _next_tokens: dict[str, int] = field(default_factory=dict)
    _ask_at: float | None = None
    """When the ranks are asked to settle the samples without a receipt."""
    _question: int | None = None
    _settled: bool = False
    _again: set[str] = field(default_factory=set)
    """Samples that are computed a second time, without the rows of others."""
    _found: dict[str, list[tuple[Receipt, bytes]]] = field(default_factory=dict)
    """Receipts of all ranks, of samples that need not be computed again."""

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
        self.reuses = False
        """Whether rows of shared prefixes are computed once."""
        self.recomputed = 0
        """Samples that were computed again, since rows of others that they began with were no longer held."""
        self.continuation: tuple[int, ...] = ()
        """Tokens that the model went on with after the spec's probe, greedily."""
        self.waits: list[dict[str, float]] = []
        """Per rank, seconds that the engine waited for the copy and for the writers; known after shutdown."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._questions = itertools.count()
        self._started: Future[None] = Future()
        self._stopping = threading.Event()
        self._dead: BaseException | None = None
        self._active: list[Job] = []
        self._processes: list[Process] = []
        self._lost_at: float | None = None
        self._logs: Receiver | None = None
        self._others = set(multiprocessing.active_children())
        self._devices = Devices(spec.owner)
        # What the engine logs belongs to the run that made it.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="layertap-engine", daemon=True)

    def start(self) -> Self:
        """Load the model and prove the capture on probe samples; returns when the engine is ready."""
        self._inbox = Inbox(self.spec.engine.tensor_parallel_size)
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
        """Queue a job; its future fails with :class:`EngineDied` or :class:`EngineClosed` if the engine ends first."""
        if not self.alive:
            job.receipts.set_exception(
                EngineDied("the engine is not running") if self._dead else EngineClosed("too late")
            )
        else:
            self._jobs.put(job)
        return job.receipts

    def shutdown(self) -> None:
        """End the engine and its processes; jobs that are not finished fail. Safe to call twice."""
        self._stopping.set()
        self._jobs.put(None)
        if self._thread.ident is None:
            return
        while self._thread.is_alive():
            self._thread.join(0.1)
            if not self._started.done():
                # Nothing interrupts vLLM while it loads a model, and there is nothing to be lost yet.
                for child in set(multiprocessing.active_children()) - self._others:
                    child.kill()
            limit = END_SECONDS if self._dead is None else ABANDON_SECONDS
            if self._lost_at is not None and monotonic() - self._lost_at > limit:
                # A thread inside vLLM that waits for an answer of a process that was killed never comes back.
                logger.warning("vLLM did not notice the end of its processes; its thread is left behind")
                break
        for process in self._processes:
            process.kill()
            process.gone(END_SECONDS)
        self._close_channels()
        self._devices.release()

    def _watch(self) -> None:
        """Notice the end of a process of the engine, of which vLLM does not in all cases tell who waits for it."""
        own = os.getpid()
        pids = {pid for told in self.ranks for pid in told["processes"]} if not self.spec.engine.in_process else set()
        try:
            self._processes = [Process(pid) for pid in pids - {own}]
        except ProcessLookupError as error:
            raise EngineDied("one of its processes ended while it was started") from error
        for process in self._processes:
            process.when_gone(self._lose)

    def _lose(self) -> None:
        self._lost_at = self._lost_at or monotonic()
        if self._stopping.is_set():
            return  # as it should be
        self._dead = self._dead or EngineDied("one of its processes ended")
        self._stopping.set()
        for process in self._processes:
            process.kill()
        with suppress(InvalidStateError):  # it was ready
            self._started.set_exception(self._dead)
        self._fail()

    # Everything below runs on the engine's own thread.

    def _run(self) -> None:
        vllm_engine = None
        try:
            _prepare_for_children()
            with others_kept():
                vllm_engine = self._load()
            self._watch()
            self._probe(vllm_engine)
            self._go_on(vllm_engine)
            self._started.set_result(None)
            self._serve(vllm_engine, self._active)
        except BaseException as error:
            self._dead = self._dead or error
            with suppress(InvalidStateError):
                self._started.set_exception(self._dead)
        finally:
            self._stopping.set()
            try:
                if vllm_engine is not None:
                    self._unload(vllm_engine)
            except Exception as error:
                logger.warning(f"the engine did not shut down in order: {error}")
            finally:
                self._close_channels()
                if not self._processes:  # else once they are gone
                    self._devices.release()
                self._fail()

    def _close_channels(self) -> None:
        if self._logs is not None:
            self._logs.close()
        self._inbox.close()

    def _fail(self) -> None:
        """Let all jobs know that the engine has ended."""
        waiting = list(self._active)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                waiting.append(job)
        for job in waiting:
            with suppress(InvalidStateError):  # it was done
                job.receipts.set_exception(self._end())

    def _end(self) -> Exception:
        """Why the engine takes no jobs any more."""
        if self._dead is None:
            return EngineClosed("the engine was shut down")
        died = EngineDied(f"the engine ended: {self._dead}")
        died.__cause__ = self._dead
        return died

    def _load(self) -> Any:
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.spec.engine.in_process else "1"
        # The flow has threads; a forked child could inherit a lock that one of them holds.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # One token is sampled a prompt, greedily; flashinfer's sampler is compiled on first use, may not be installed,
        # and was reported to cost more than all else on some GPUs.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        self._logs = Receiver()
        from vllm.platforms import current_platform

        visible = os.environ.get(current_platform.device_control_env_var)
        devices = engine_devices(self.spec.engine.tensor_parallel_size, visible, current_platform.is_cpu())
        if not self._devices.take(devices, self._stopping):  # before their free memory is looked at
            raise EngineDied("the engine was shut down while it waited for its devices")
        machine = look(self.spec.engine.tensor_parallel_size)
        spec = self.spec
        if machine.gpus:
            capability = machine.gpus[0].capability
            for warning in check_gpus(spec.checkpoint, spec.engine, capability, nvlink=machine.nvlink):
                logger.warning(warning)
        engine = fitted(spec.checkpoint, spec.depths, spec.dtype, spec.engine, machine, reuse=spec.reuse)
        self.spec = spec = replace(spec, engine=engine)
        on_cpu = machine.on_cpu
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
            "enable_prefix_caching": spec.reuse,
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
            deepseek = spec.checkpoint.architecture in DEEPSEEK
            if deepseek and "attention_config" not in engine.extra:
                # Where a CPU has AMX, vLLM would choose kernels that know bfloat16 only.
                arguments.setdefault("attention_backend", "CPU_MLA")
            if spec.reuse and not deepseek:
                arguments.setdefault("block_size", CPU_REUSE_BLOCK)

        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        # These imports leave objects by the hundred thousand; at its end Python would look through them for seconds.
        atexit.register(gc.freeze)
        try:
            vllm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (TypeError, ValueError) as error:
            raise StartupError(f"vLLM {vllm_version()} refused the engine's arguments: {error}") from error
        except RuntimeError as error:  # of another process, which has logged what went wrong there
            self._logs.close()
            if self._logs.failure is None:
                raise
            raise RuntimeError(f"vLLM could not start: {self._logs.failure}") from error
        self.reuses = bool(vllm_engine.vllm_config.cache_config.enable_prefix_caching)
        if spec.reuse and not self.reuses:
            device = "a CPU" if on_cpu else "this device"
            logger.warning(
                f"prefixes are not reused: vLLM cannot keep them for {spec.checkpoint.architecture} on {device}"
            )
        try:
            self.ranks = vllm_engine.collective_rpc("layertap_open", args=(asdict(self._settings()),))
            self._inbox.accept()
        except BaseException:
            vllm_engine.engine_core.shutdown()
            raise
        # Half a step apart, the ranks still write beside each other most of the time.
        lead = (engine.max_num_batched_tokens or 0) // 2
        self._deal = Deal(self._writers, block=self.ranks[0]["kv_block"], lead=lead)
        return vllm_engine

    @property
    def _writers(self) -> int:
        """Ranks that write."""
        engine = self.spec.engine
        return engine.tensor_parallel_size if engine.writing_ranks == "all" else 1

    def _settings(self) -> CaptureSettings:
        engine, writers = self.spec.engine, self._writers
        return CaptureSettings(
            stage=self.spec.stage,
            stage_spec=dict(self.spec.stage_spec),
            receipts=self._inbox.address,
            writer_threads=-(-engine.writer_threads // writers),
            staging_bytes=int(engine.staging_gib * 2**30) // writers,
            ring_slots=engine.ring_slots or 2,
            deal=writers > 1,
            writer_process=engine.writer_process,
            reuse_bytes=int(engine.reuse_gib * 2**30) // writers if self.reuses else 0,
        )

    def _unload(self, vllm_engine: Any) -> None:
        self._inbox.expect_end()
        try:
            if self._dead is None:
                self.waits = vllm_engine.collective_rpc("layertap_close")
        finally:
            # All is written, or lost. What they would still do is take their interpreters apart, which costs each
            # seconds of processor time; vLLM alone would give them 5 s.
            vllm_engine.engine_core.shutdown(timeout=LINGER_SECONDS)
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

    def _go_on(self, vllm_engine: Any) -> None:
        """Let the model go on with the sentence that it is to be known by."""
        from vllm import SamplingParams

        tokens = min(GO_ON_TOKENS, self.spec.engine.max_model_len - len(self.spec.probe))
        if not self.spec.probe or tokens < 1:
            return
        parameters = SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False)
        # The salt keeps it apart from samples, where the engine remembers what prompts begin with.
        prompt = {"prompt_token_ids": list(self.spec.probe), "cache_salt": "probe"}
        vllm_engine.add_request(f"{1:064x}", prompt, parameters)
        while not self.continuation and not self._stopping.is_set():
            for output in vllm_engine.step():
                if output.finished:
                    self.continuation = tuple(output.outputs[0].token_ids)

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the engine once it has started, for the store to keep."""
        engine = self.spec.engine
        sizes = {name: getattr(engine, name) for name in ("max_num_batched_tokens", "ring_slots", "writing_ranks")}
        return {name: self.ranks[0][name] for name in ("device", "model_runner")} | sizes

    def _serve(self, vllm_engine: Any, active: list[Job], *, until_done: bool = False) -> None:
        admitted = 0
        owner: dict[str, Job] = {}
        while not self._stopping.is_set():
            running = bool(owner)
            if not until_done:
                self._take_jobs(active, wait=POLL_SECONDS if active and not running else None if not active else 0)
                if self._stopping.is_set():
                    return
            ahead = ADMIT_STEPS * (self.spec.engine.max_num_batched_tokens or 0)
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
                        if output.request_id not in job._again:
                            job.on_sample(output.request_id, len(job.samples[output.request_id]))
            for job in [j for j in active[:admitted] if j._computed]:
                if self._collect(vllm_engine, job, idle=not owner):
                    active.remove(job)
                    admitted -= 1
                else:
                    self._ask(vllm_engine, job, [key for key in job.samples if key not in job._next_tokens], owner)
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
        # What a suspect's computation may have left behind must not come into others', nor theirs into it. Its own
        # worker clears the KV cache; the engine must know that nothing is kept there.
        if job.suspect and self.reuses and not vllm_engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not let go of its prefix cache, with no request under way")
        self._ask(vllm_engine, job, list(job.samples), owner)

    def _ask(self, vllm_engine: Any, job: Job, keys: list[str], owner: dict[str, Job]) -> None:
        """Give samples of a job to the engine; those that are computed again read no prefix from its KV cache."""
        from vllm import SamplingParams

        if not keys:
            return
        if job.suspect:
            vllm_engine.collective_rpc("layertap_suspect", args=(keys,))
        for key in keys:
            ids_T = job.samples[key]
            # A question to the workers would make the engine finish the steps under way first; a request's own
            # arguments reach them with its first step.
            told: dict[str, Any] = {"directory": str(job.directory)}
            if self.reuses and not job.suspect:
                told["shared"] = len(ids_T) if job.shared is None else job.shared[key]
                told["prefix"] = b"".join(prefix_names(ids_T[: told["shared"]], self.ranks[0]["kv_block"]))
            told["writer"] = self._deal.writer(len(ids_T), told.get("prefix", b""))
            parameters = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                extra_args={"layertap": told},
                skip_reading_prefix_cache=key in job._again,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": ids_T.tolist()}
            if job.suspect:
                prompt["cache_salt"] = f"suspect {key}"  # neither reads what others have computed nor is read
            vllm_engine.add_request(key, prompt, parameters)
            owner[key] = job

    def _collect(self, vllm_engine: Any, job: Job, *, idle: bool) -> bool:
        """Give a job whose samples are computed its receipts, once they are all there.

        Returns:
            False if they are not; those of the samples that must be computed again are not in ``job._next_tokens``.
        """
        waiting = [key for key in job.samples if key not in job._found]
        found = self._inbox.take(waiting, job._question)
        if found is None:
            self._settle(vllm_engine, job, waiting, idle=idle)
            return False
        # All ranks hold the same rows; should one ever lack what another had, all compute the sample again.
        gone = {key for key, of_sample in found.items() if any(receipt.rows_gone for receipt, _ in of_sample)}
        job._found.update((key, of_sample) for key, of_sample in found.items() if key not in gone)
        if gone:
            self.recomputed += len(gone - job._again)
            job._again |= gone
            job._ask_at, job._question, job._settled = None, None, False
            for key in gone:
                del job._next_tokens[key]
            return False
        receipts: dict[str, list[Receipt]] = {}
        for key, of_sample in job._found.items():
            next_token = job._next_tokens[key]
            receipts[key] = [replace(receipt, next_token=next_token) for receipt, _ in of_sample]
            if len({receipt.digests for receipt in receipts[key]}) > 1:
                digests = [digests for _, digests in of_sample]
                receipts[key] = self._with_evidence(vllm_engine, receipts[key], digests, job.suspect)
        if job.suspect:
            vllm_engine.collective_rpc("layertap_release")
        job.receipts.set_result(receipts)
        return True

    def _settle(self, vllm_engine: Any, job: Job, keys: list[str], *, idle: bool) -> None:
        """Let samples that will never be whole have receipts; seldom, since a question costs a busy engine time."""
        if job._ask_at is None:
            job._ask_at = monotonic() + SETTLE_SECONDS
        if job._settled or (not idle and monotonic() < job._ask_at):
            return
        if job._question is None:
            job._question = next(self._questions)
        job._ask_at = monotonic() + SETTLE_SECONDS
        job._settled = all(vllm_engine.collective_rpc("layertap_settle", args=(job._question, keys)))

    def _with_evidence(
        self, vllm_engine: Any, receipts: list[Receipt], digests: list[bytes], suspect: bool
    ) -> list[Receipt]:
        """Add what the ranks know of single rows, since they disagree."""
        digests_TL = [np.frombuffer(d, "<i8").reshape(-1, len(self.spec.depths)) for d in digests]
        differ_T = differing_rows(digests_TL).any(axis=1)
        rows = np.flatnonzero(differ_T)[:EVIDENCE_ROWS].tolist()
        values: list[bytes | None] = [None] * len(receipts)
        if suspect:
            values = vllm_engine.collective_rpc("layertap_values", args=(receipts[0].key, rows))
        evidence = [RowEvidence(d, tuple(rows), v) for d, v in zip(digests, values, strict=True)]
        return [replace(receipt, evidence=e) for receipt, e in zip(receipts, evidence, strict=True)]


def _prepare_for_children() -> None:
    """Let no interrupt at the terminal reach the processes that this thread starts; it is the run's to end them.

    vLLM's processes would end at once in the midst of their work, which looks like the engine's death.
    """
    # What vLLM's processes share is cleared away by this tracker, as they are killed at the end; no news to anybody.
    warnings = [kept for kept in os.environ.get("PYTHONWARNINGS", "").split(",") if kept and kept != TRACKER_WARNINGS]
    os.environ["PYTHONWARNINGS"] = ",".join([*warnings, TRACKER_WARNINGS])
    resource_tracker.ensure_running()  # started later, it would leave the signal unblocked
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
