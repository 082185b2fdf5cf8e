"""The capture worker: what vLLM's worker is given in addition, on every device.

The mixin asks the model for the residual stream at the configured depths, reads it after each step, and sends the
rows on their way to host memory, assembly and staging. Methods named ``layertap_*`` are called by the engine
through ``collective_rpc``; arguments and results are plain values.
"""

import contextlib
import os
import pkgutil
import select
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tasks.extract.assemble import Assembler, RowSummary
from tasks.extract.step import SeamError, Span, read_step
from tasks.extract.transfer import DirectTransfer, PinnedRing, Transfer
from tasks.extract.writer import Writer

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

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        # Dummy and warm-up batches run before the capture is opened.
        if self._open and scheduler_output.total_num_scheduled_tokens > 0:
            step = read_step(self.model_runner, len(self._depths))
            if step is not None and step.spans:
                self._transfer.send(step)
        return output

    def layertap_open(
        self, stage: str, stage_spec: dict[str, Any], writer_threads: int, staging_bytes: int, ring_slots: int
    ) -> dict[str, Any]:
        """Make ready to capture.

        Args:
            stage: the function that stages a sample, as ``package.module:function``.
            stage_spec: what it needs to know of the store.
            writer_threads: threads that encode and write.
            staging_bytes: bound on the host memory of captured samples.
            ring_slots: pinned buffers between GPU and host.

        Returns:
            What this rank is, for the engine to check and the store to record.
        """
        self._world_size = self.vllm_config.parallel_config.tensor_parallel_size
        hidden_size, dtype = self.model_config.get_hidden_size(), self.model_config.dtype
        # Every rank holds the whole residual stream; one is enough to store it, all are needed to prove it.
        keep_states = self.rank == 0
        self._writer = Writer(
            rank=self.rank,
            world_size=self._world_size,
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            stage=pkgutil.resolve_name(stage),
            stage_spec=stage_spec,
            threads=writer_threads,
            limit_bytes=staging_bytes,
        )
        self._assembler = Assembler(
            num_depths=len(self._depths),
            hidden_size=hidden_size,
            dtype=dtype,
            keep_states=keep_states,
            on_complete=self._writer.submit,
            reserve=self._writer.budget.reserve,
        )
        self._lock = threading.Lock()
        self._transfer: Transfer
        if self.device.type == "cpu":
            self._transfer = DirectTransfer(self._deliver, keep_states=keep_states)
        else:
            self._transfer = PinnedRing(
                self._deliver,
                keep_states=keep_states,
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
            "hidden_size": hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
            "model_runner": type(self.model_runner).__module__ + "." + type(self.model_runner).__name__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
        }

    def layertap_expect(self, directory: str, samples: dict[str, int]) -> None:
        """Announce samples (key -> tokens) and the directory to stage them in, before the engine is asked for them."""
        with self._lock:
            for key, num_tokens in samples.items():
                self._assembler.expect(key, num_tokens, Path(directory))

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

    def layertap_release(self, keys: list[str]) -> None:
        """Forget receipts that every rank has handed over."""
        self._writer.forget(keys)

    def layertap_close(self) -> dict[str, float]:
        """Stop capturing.

        Returns:
            Seconds that the engine has waited for the copy to the host and for the writers.
        """
        self._open = False
        self._transfer.close()
        self._writer.close()
        return {"waited_for_copy": self._transfer.waited, "waited_for_writers": self._writer.budget.waited}

    def _deliver(self, spans: Sequence[Span], states: Sequence[torch.Tensor], summary: RowSummary) -> None:
        with self._lock:
            for span in spans:
                # vLLM appends "-" and 8 hex digits to the id that a request was given.
                key = span.request_id.rpartition("-")[0]
                self._assembler.add(key, span.start, states, summary, span.rows)


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
