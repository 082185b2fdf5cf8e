"""The capture worker: what vLLM's worker is given in addition, on every device.

The mixin asks the model for the residual stream at the configured depths, reads it after each step, and sends the
rows on their way to host memory, assembly and staging. Methods named ``layertap_*`` are called by the engine
through ``collective_rpc``; arguments and results are plain values.
"""

import os
import pkgutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tasks.extract.assemble import Assembler, RowSummary
from tasks.extract.logs import forward_own
from tasks.extract.step import MisshapenStep, SeamError, Span, Step, check_step, read_step
from tasks.extract.transfer import DirectTransfer, PinnedRing, Place, Transfer
from tasks.extract.witness import Witness
from tasks.extract.writer import Writer
from tasks.processes import Process
from tasks.report.log import logger

OWNER_VARIABLE = "LAYERTAP_OWNER_PID"
"""Environment variable with the process id of the flow; the engine's processes end when that process does."""


def serve_owner() -> None:
    """Tie this process to the flow's, where it is another: log there, and end when it is gone.

    A flow that is killed cannot shut its engine down; the engine would keep its memory for ever. A rank also ends with
    the engine process between it and the flow, at once, as nothing that it holds is of use any more.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid():
        return
    itself, above = Process(os.getpid()), Process(os.getppid())
    above.when_gone(itself.kill)
    if above.pid != owner:

        def end() -> None:
            above.kill()
            itself.kill()

        Process(owner).when_gone(end)
    forward_own()


class CaptureMixin:
    """Mixed into vLLM's GPU or CPU worker, in front of it."""

    if TYPE_CHECKING:
        rank: int
        vllm_config: Any
        model_config: Any
        model_runner: Any
        device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        serve_owner()
        self._open = False
        super().__init__(*args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)  # type: ignore[misc]
        settings = self.vllm_config.additional_config["layertap"]
        self._depths = tuple(settings["depths"])
        ask_for_depths(self.model_runner, self._depths)
        # A compiled graph does not call the layers as modules; there the next-token proof stands alone.
        watch = self.vllm_config.model_config.enforce_eager
        self._witness = Witness(self.model_runner.get_model(), self._depths) if watch else None

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        # Dummy and warm-up batches run before the capture is opened.
        if self._open and scheduler_output.total_num_scheduled_tokens > 0:
            try:
                step = self._observe()
            except MisshapenStep as fault:
                self._refuse(fault)
            else:
                if step is not None and step.spans:
                    self._keep_suspects(step)
                    self._transfer.send(step)
        return output

    def _observe(self) -> Step | None:
        """The step as it was computed, checked, with what the layers themselves were given."""
        step = self._read_step()
        if step is None:
            return None
        seen = None if self._witness is None else self._witness.take(step.input_ids.shape[0])
        check_step(step, len(self._depths), self.model_config.get_hidden_size(), self.model_config.dtype)
        return replace(step, witness=seen)

    def _read_step(self) -> Step | None:
        return read_step(self.model_runner, len(self._depths))

    def _refuse(self, fault: MisshapenStep) -> None:
        """Give up the samples of a step whose states have the wrong shape; the others go on."""
        logger.warning(f"rank {self.rank}: {fault}")
        with self._lock:
            for span in fault.spans:
                rows = span.rows.stop - span.rows.start
                # With all rows of the step there, and only then, this sample's share of them is known.
                whole = len(fault.shape) > 1 and fault.shape[1] == fault.spans[-1].rows.stop
                shape = (fault.shape[0], rows, *fault.shape[2:]) if whole else fault.shape
                self._assembler.refuse(_key(span), shape, fault.dtype)

    def _keep_suspects(self, step: Step) -> None:
        """Copy the rows of samples under suspicion, so that ranks can be compared value by value."""
        for span in step.spans:
            if (kept := self._suspects.get(_key(span))) is not None:
                rows_LNH = torch.stack([rows_NH[span.rows] for rows_NH in step.states])
                kept.append((span.start, rows_LNH.float().cpu()))

    def layertap_open(
        self,
        stage: str,
        stage_spec: dict[str, Any],
        writer_threads: int,
        staging_bytes: int,
        ring_slots: int,
        deal: bool,
    ) -> dict[str, Any]:
        """Make ready to capture.

        Args:
            stage: the function that stages a sample, as ``package.module:function``.
            stage_spec: what it needs to know of the store.
            writer_threads: threads of this rank that encode and write.
            staging_bytes: bound on this rank's host memory for captured samples.
            ring_slots: pinned buffers between GPU and host.
            deal: whether samples are dealt over the ranks to be written, or all written by the first.

        Returns:
            What this rank is, for the engine to check and the store to record.
        """
        self._world_size = self.vllm_config.parallel_config.tensor_parallel_size
        self._suspects: dict[str, list[tuple[int, torch.Tensor]]] = {}
        hidden_size, dtype = self.model_config.get_hidden_size(), self.model_config.dtype
        self._deal = deal
        self._writer = Writer(
            rank=self.rank,
            world_size=self._world_size,
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            stage=pkgutil.resolve_name(stage),
            stage_spec=stage_spec,
            threads=writer_threads,
            limit_bytes=staging_bytes,
            witnessed=self._witness is not None,
        )
        self._assembler = Assembler(
            num_depths=len(self._depths),
            hidden_size=hidden_size,
            dtype=dtype,
            keeps=self._keeps,
            on_complete=self._writer.submit,
            take=self._writer.memory.take,
        )
        self._lock = threading.Lock()
        self._transfer: Transfer
        if self.device.type == "cpu":
            self._transfer = DirectTransfer(self._deliver, lambda span: self._keeps(_key(span)))
        else:
            self._transfer = PinnedRing(
                self._deliver,
                lambda span: self._keeps(_key(span)),
                slots=ring_slots,
                num_depths=len(self._depths),
                max_rows=self.vllm_config.scheduler_config.max_num_batched_tokens,
                hidden_size=hidden_size,
                dtype=dtype,
                device=self.device,
            )
        self._open = True
        return {
            "rank": self.rank,
            "world_size": self._world_size,
            "processes": [os.getpid(), os.getppid()],
            "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
            "model_runner": type(self.model_runner).__module__ + "." + type(self.model_runner).__name__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
        }

    def layertap_expect(self, directory: str, samples: dict[str, int], suspect: bool = False) -> None:
        """Announce samples, before the engine is asked for them.

        Args:
            directory: to stage them in.
            samples: key -> tokens.
            suspect: whether every rank keeps the values of their rows for :meth:`layertap_evidence`; nothing else may
                be in the engine then.
        """
        if suspect:
            # A NaN that an earlier sample left there would come into others: masked out is multiplied by zero.
            for cache in self.model_runner.kv_caches:
                cache.zero_()
        with self._lock:
            for key, num_tokens in samples.items():
                self._assembler.expect(key, num_tokens, Path(directory))
                if suspect:
                    self._suspects[key] = []

    def layertap_collect(self, keys: list[str]) -> list[dict[str, Any]] | None:
        """Receipts of samples whose requests have finished; None while some are still on their way to the disk."""
        if not self._transfer.idle:
            return None
        with self._lock:
            for key in keys:
                unfinished = self._assembler.forget(key)
                if unfinished is not None:
                    self._writer.abandon(unfinished)
        if not all(self._writer.ready(key) for key in keys):
            return None
        return [self._writer.receipt(key).to_dict() for key in keys]

    def layertap_evidence(self, key: str, rows: list[int]) -> dict[str, Any]:
        """What this rank knows of single rows of a sample whose receipt was collected and not released.

        Returns:
            ``digests`` of all its rows and, of a suspect, the ``values`` of those asked for
            (see :class:`tasks.vocabulary.RowEvidence`).
        """
        values = None
        if rows and self._suspects.get(key):
            pieces = self._suspects[key]
            length = max(start + piece.shape[1] for start, piece in pieces)
            whole_LTH = torch.full((pieces[0][1].shape[0], length, pieces[0][1].shape[2]), torch.nan)
            for start, piece in pieces:
                whole_LTH[:, start : start + piece.shape[1]] = piece
            values = whole_LTH[:, rows].contiguous().numpy().astype("<f4").tobytes()
        return {"digests": self._writer.row_digests(key), "rows": rows, "values": values}

    def layertap_release(self, keys: list[str]) -> None:
        """Forget receipts that every rank has handed over."""
        self._writer.forget(keys)
        for key in keys:
            self._suspects.pop(key, None)

    def layertap_close(self) -> dict[str, float]:
        """Stop capturing.

        Returns:
            Seconds that the engine has waited for the copy to the host and for the writers.
        """
        self._open = False
        self._transfer.close()
        self._writer.close()
        return {"waited_for_copy": self._transfer.waited, "waited_for_writers": self._writer.memory.waited}

    def _keeps(self, key: str) -> bool:
        # Every rank holds the whole residual stream; one is enough to store a sample, all are needed to prove it.
        return (int(key[:8], 16) % self._world_size if self._deal else 0) == self.rank

    def _deliver(self, places: Sequence[Place], states: Sequence[torch.Tensor], summary: RowSummary) -> None:
        with self._lock:
            for span, state_rows in places:
                self._assembler.add(_key(span), span.start, states, summary, span.rows, state_rows)


def _key(span: Span) -> str:
    # vLLM appends "-" and 8 hex digits to the id that a request was given.
    return span.request_id.rpartition("-")[0]


def ask_for_depths(model_runner: Any, depths: tuple[int, ...]) -> None:
    """Make the model return r_k for each depth k (vLLM's id k is the input of decoder layer k).

    Raises:
        SeamError: the model or the runner has no such switch.
    """
    if not hasattr(model_runner, "use_aux_hidden_state_outputs"):
        raise SeamError(f"{type(model_runner).__module__} has no use_aux_hidden_state_outputs")
    model = model_runner.get_model()
    if not hasattr(model, "set_aux_hidden_state_layers"):
        raise SeamError(f"{type(model).__name__} cannot return auxiliary hidden states in this version of vLLM")
    model_runner.use_aux_hidden_state_outputs = True
    model.set_aux_hidden_state_layers(depths)
