"""The capture worker: what vLLM's worker is given in addition, on every device.

The mixin asks the model for the residual stream at the configured depths, reads it after each step, and sends the
rows on their way to host memory, assembly and staging. Methods named ``layertap_*`` are called by the engine
through ``collective_rpc``; arguments and results are plain values.
"""

import contextlib
import os
import select
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from tasks.extract.assembly import Assembly, AssemblySpec
from tasks.extract.assembly_process import AssemblyProcess
from tasks.extract.step import MisshapenStep, SeamError, Step, check_step, read_step
from tasks.extract.transfer import DirectTransfer, SharedRing, Transfer
from tasks.extract.witness import Witness
from tasks.report.log import logger
from tasks.vocabulary import Receipt

OWNER_VARIABLE = "LAYERTAP_OWNER_PID"
"""Environment variable with the process id of the flow; the engine's processes end when that process does."""


def watch_owner() -> None:
    """End this process, and the engine process above it, as soon as the flow's process is gone.

    A flow that is killed cannot shut its engine down; the engine would keep its memory for ever.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid():
        return
    descriptor = os.pidfd_open(owner)
    parent = os.getppid()

    def wait() -> None:
        select.select([descriptor], [], [])  # a process descriptor becomes readable when the process ends
        if parent not in (1, owner):
            with contextlib.suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="layertap-owner-watch", daemon=True).start()


class CaptureMixin:
    """Mixed into vLLM's GPU or CPU worker, in front of it."""

    if TYPE_CHECKING:
        rank: int
        vllm_config: Any
        model_config: Any
        model_runner: Any
        device: torch.device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        watch_owner()
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
        for span in fault.spans:
            rows = span.rows.stop - span.rows.start
            # With all rows of the step there, and only then, this sample's share of them is known.
            whole = len(fault.shape) > 1 and fault.shape[1] == fault.spans[-1].rows.stop
            shape = (fault.shape[0], rows, *fault.shape[2:]) if whole else fault.shape
            self._assembly.refuse(span.key, shape, fault.dtype)

    def _keep_suspects(self, step: Step) -> None:
        """Copy the rows of samples under suspicion, so that ranks can be compared value by value."""
        for span in step.spans:
            if (kept := self._suspects.get(span.key)) is not None:
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
        writer_process: bool | None,
    ) -> dict[str, Any]:
        """Make ready to capture.

        Args:
            stage: the function that stages a sample, as ``package.module:function``.
            stage_spec: what it needs to know of the store.
            writer_threads: threads of this rank that encode and write.
            staging_bytes: bound on this rank's host memory for captured samples.
            ring_slots: buffers between the device and the process that writes.
            deal: whether samples are dealt over the ranks to be written, or all written by the first.
            writer_process: whether samples are assembled and written in a process of their own; on a GPU if None.

        Returns:
            What this rank is, for the engine to check and the store to record.
        """
        spec = AssemblySpec(
            rank=self.rank,
            world_size=self.vllm_config.parallel_config.tensor_parallel_size,
            num_depths=len(self._depths),
            hidden_size=self.model_config.get_hidden_size(),
            dtype=str(self.model_config.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            deal=deal,
            stage=stage,
            stage_spec=stage_spec,
            writer_threads=writer_threads,
            staging_bytes=staging_bytes,
            witnessed=self._witness is not None,
        )
        self._suspects: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._receipts: dict[str, tuple[Receipt, npt.NDArray[Any]]] = {}
        self._sent_before: dict[str, int] = {}
        self._assembly: Assembly | AssemblyProcess
        self._transfer: Transfer
        if self.device.type == "cpu" and not writer_process:
            self._assembly = Assembly(spec, self._keep_receipt)
            self._transfer = DirectTransfer(self._assembly, spec)
        else:
            max_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
            self._assembly = AssemblyProcess(spec, self._keep_receipt, slots=ring_slots, max_rows=max_rows)
            self._transfer = SharedRing(self._assembly, spec, self.device)
        self._open = True
        return {
            "rank": spec.rank,
            "world_size": spec.world_size,
            "hidden_size": spec.hidden_size,
            "dtype": spec.dtype,
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
            self._suspects.update({key: [] for key in samples})
        self._assembly.expect(directory, samples)

    def layertap_collect(self, keys: list[str]) -> list[dict[str, Any]] | None:
        """Receipts of samples whose requests have finished; None while some are still on their way to the disk."""
        first = keys[0]
        if first not in self._sent_before:
            self._sent_before[first] = self._transfer.sent
        if self._sent_before[first] > self._transfer.delivered:
            return None
        if self._sent_before[first] >= 0:
            self._assembly.settle(keys)
            self._sent_before[first] = -1
        if not all(key in self._receipts for key in keys):
            return None
        return [self._receipts[key][0].to_dict() for key in keys]

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
        return {"digests": self._receipts[key][1].astype("<i8").tobytes(), "rows": rows, "values": values}

    def layertap_release(self, keys: list[str]) -> None:
        """Forget receipts that every rank has handed over."""
        self._sent_before.pop(keys[0], None)
        for key in keys:
            self._receipts.pop(key, None)
            self._suspects.pop(key, None)

    def layertap_close(self) -> dict[str, float]:
        """Stop capturing.

        Returns:
            Seconds that the engine has waited for the copy to the host and for the writers, and what these did.
        """
        self._open = False
        self._transfer.close()
        return {"waited_for_copy": self._transfer.waited, **self._assembly.close()}

    def _keep_receipt(self, receipt: Receipt, digests_TL: npt.NDArray[Any]) -> None:
        self._receipts[receipt.key] = receipt, digests_TL


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
