"""Capture workers that can be told to stand aside, so that one engine runs plain prefill and extraction in turn."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tasks.extract import assemble, transfer
from tasks.extract.capture import CaptureMixin, ask_for_depths
from tasks.extract.step import Step
from tasks.extract.witness import Witness


class Pausing(CaptureMixin):
    """Adds what only a benchmark needs."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.vllm_config.load_config.load_format == "dummy":
            scale_up(self.model_runner.get_model())

    def bench_pause(self, paused: bool) -> None:
        """Let the model run as it would without any capture, or capture again."""
        self._open = not paused
        ask_for_depths(self.model_runner, () if paused else self._depths)
        self.model_runner.use_aux_hidden_state_outputs = not paused
        if self._witness is not None:
            if paused:
                for hook in self._witness.hooks:
                    hook.remove()
            else:
                self._witness = Witness(self.model_runner.get_model(), self._depths)

    def bench_aux(self) -> None:
        """Let the paused model hand out its states, with nobody to take them."""
        ask_for_depths(self.model_runner, self._depths)

    def bench_verify(self, wanted: bool) -> None:
        """Capture with or without digests and witness; without, receipts say nothing true of the states."""
        transfer.summarize = timed(assemble.summarize) if wanted else unverified  # type: ignore[attr-defined]
        if self._witness is not None:
            for hook in self._witness.hooks:
                hook.remove()
        self._witness = TimedWitness(self.model_runner.get_model(), self._depths) if wanted else None

    def bench_verify_seconds(self) -> float:
        """Seconds spent in digests and witness since the last call; on a GPU, in launching them."""
        spent = SPENT["s"]
        SPENT["s"] = 0.0
        return spent

    def bench_forget_prefixes(self) -> None:
        """Let go of rows held for other samples.

        Without torch: where the engine is in this process, the calling thread would get helpers of its own, there would
        be more of them than cores, and OpenMP would let none of the engine's wait for work awake.
        """
        self._assembly.forget_prefixes()

    def bench_host(self) -> dict[str, int]:
        """Host memory that this rank holds now, in bytes; memory that its two processes share is in both."""
        pid = getattr(self._assembly, "pid", None)
        return {"worker": resident(os.getpid())} | ({} if pid is None else {"writing": resident(pid)})

    def bench_report(self) -> dict[str, Any]:
        """Peak memory of this rank in bytes, and the seconds that the engine has waited so far."""
        status = Path("/proc/self/status").read_text().splitlines()
        host = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        writing = self._assembly.report()
        return writing | {
            "gpu_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
            "host_bytes": host + writing.get("host_bytes", 0),
            "waited_for_copy": self._transfer.waited,
        }


class Watching(CaptureMixin):
    """Counts what a check must know to have happened."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self._ends: dict[str, int] = {}
        self._pieces: dict[str, int] = {}
        self._restarts = 0

    def _read_step(self) -> Step | None:
        step = super()._read_step()
        for span in () if step is None else step.spans:
            # Rows that were computed before come again only after a preemption.
            self._restarts += span.start < self._ends.get(span.request_id, 0)
            self._ends[span.request_id] = span.start + span.rows.stop - span.rows.start
            self._pieces[span.key] = self._pieces.get(span.key, 0) + 1
        return step

    def bench_pid(self) -> int:
        """The process that computes."""
        return os.getpid()

    def bench_restarts(self) -> int:
        """How often a request was preempted and began again."""
        return self._restarts

    def bench_pieces(self, key: str) -> int:
        """Steps that a sample's rows came in."""
        return self._pieces.get(key, 0)


def scale_up(model: torch.nn.Module) -> None:
    """Give made-up weights the size of trained ones.

    vLLM makes them so small that no layer changes the residual stream: all depths would be equal bit for bit, and so
    would all rows of one token.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                weight.mul_(20)
            elif name.endswith("norm.weight"):
                weight.fill_(1)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds, without the files that it has mapped."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


SPENT = {"s": 0.0}


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its time added up."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SPENT["s"] += perf_counter() - began

    return call


class TimedWitness(Witness):
    """A witness whose hooks' time is added up."""

    def _hook(self, depth: int, hidden: int, residual: int) -> Any:
        return timed(super()._hook(depth, hidden, residual))


def unverified(
    states: Sequence[torch.Tensor], input_ids: torch.Tensor, witness: Sequence[torch.Tensor] | None = None
) -> assemble.RowSummary:
    """A summary of a step that has not looked at the states."""
    shape = (input_ids.shape[0], len(states))

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=input_ids.device)

    return assemble.RowSummary(
        zeros(torch.int64),
        zeros(torch.float64),
        zeros(torch.int32),
        zeros(torch.bool),
        zeros(torch.bool),
        input_ids.to(torch.int32),
    )


def __getattr__(name: str) -> Any:
    if name not in ("Cpu", "Gpu", "CpuWatching", "GpuWatching"):
        raise AttributeError(name)
    if name.startswith("Cpu"):
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    return type(name, (Watching if name.endswith("Watching") else Pausing, Worker), {})
