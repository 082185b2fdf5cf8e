"""The capture worker: what vLLM's worker is given in addition, on every device.

The mixin asks the model for the residual stream at the configured depths, reads it after each step, and sends the
rows on their way to host memory, assembly and staging. Methods named ``layertap_*`` are called by the engine
through ``collective_rpc``; arguments and results are plain values.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from time import sleep
from typing import TYPE_CHECKING, Any

import torch

from tasks.extract.assembly import Assembly, AssemblySpec, CaptureSettings, Wanted
from tasks.extract.assembly_process import AssemblyProcess
from tasks.extract.logs import forward_own
from tasks.extract.step import MisshapenStep, SeamError, Span, Step, check_step, read_step, sample_key
from tasks.extract.transfer import DirectTransfer, SharedRing, Transfer
from tasks.extract.witness import Witness
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
        if self._open:
            for request_id in scheduler_output.finished_req_ids:
                self._under_way.pop(sample_key(request_id), None)
            if wanted := list(_wanted(scheduler_output)):
                self._expect(wanted)
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

    def _expect(self, wanted: list[Wanted]) -> None:
        self._assembly.expect(wanted)
        self._under_way.update((sample.key, sample) for sample in wanted)

    def _wants(self, span: Span) -> bool:
        """Whether the states of these rows come to this rank's host memory: to be written, or held for others."""
        sample = self._under_way.get(span.key)
        if sample is None:
            return False
        held = sample.num_blocks * self._spec.block if self._spec.keeps_any else 0
        return sample.writer == self._spec.rank or span.start < held

    def layertap_open(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Make ready to capture.

        Args:
            settings: of :class:`CaptureSettings`.

        Returns:
            What this rank is, for the engine to check and the store to record.
        """
        asked = CaptureSettings(**settings)
        spec = AssemblySpec(
            rank=self.rank,
            world_size=self.vllm_config.parallel_config.tensor_parallel_size,
            num_depths=len(self._depths),
            hidden_size=self.model_config.get_hidden_size(),
            dtype=str(self.model_config.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            witnessed=self._witness is not None,
            block=self._kv_block(),
            settings=asked,
        )
        self._spec = spec
        self._under_way: dict[str, Wanted] = {}
        """Samples whose requests have not finished, by key."""
        self._suspects: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._settling: dict[int, int] = {}
        self._assembly: Assembly | AssemblyProcess
        self._transfer: Transfer
        if self.device.type == "cpu" and not asked.writer_process:
            self._assembly = Assembly(spec)
            self._transfer = DirectTransfer(self._assembly, self._wants)
        else:
            max_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
            self._assembly = AssemblyProcess(spec, slots=asked.ring_slots, max_rows=max_rows)
            # A compiled model may keep its outputs in one place; r_0 is the embedding, which some runners do.
            lent = self._witness is None or 0 in self._depths
            self._transfer = SharedRing(self._assembly, self._wants, self.device, lent=lent)
        self._open = True
        return {
            "rank": spec.rank,
            "world_size": spec.world_size,
            "processes": [os.getpid(), os.getppid()],
            "hidden_size": spec.hidden_size,
            "dtype": spec.dtype,
            "model_runner": type(self.model_runner).__module__ + "." + type(self.model_runner).__name__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type,
            "kv_block": spec.block,
        }

    def _kv_block(self) -> int:
        """Tokens of a block of the KV cache; with layers of several kinds, what all their blocks are multiples of."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        return math.gcd(*(group.kv_cache_spec.block_size for group in groups))

    def layertap_suspect(self, keys: list[str]) -> None:
        """Keep the values of samples that are about to be asked for, and of nothing else, until they are released."""
        # A NaN that an earlier sample left there would come into others: masked out is multiplied by zero.
        for cache in self.model_runner.kv_caches:
            cache.zero_()
        # Rows that are still on their way here would be held after all, on some ranks and not on others.
        while self._transfer.delivered < self._transfer.sent:
            sleep(0.001)
        self._assembly.forget_prefixes()
        self._suspects = {key: [] for key in keys}

    def layertap_release(self) -> None:
        """Forget the suspects."""
        self._suspects = {}

    def layertap_settle(self, question: int, keys: list[str]) -> bool:
        """Let samples whose requests have finished have a receipt even where rows are missing.

        Args:
            question: a number that is used for these samples only.
            keys: of the samples.

        Returns:
            False while steps are on their way to host memory that may hold their rows; ask again then.
        """
        sent = self._settling.setdefault(question, self._transfer.sent)
        if self._transfer.delivered < sent:
            return False
        self._assembly.settle(question, keys)
        return True

    def layertap_values(self, key: str, rows: list[int]) -> bytes | None:
        """Values of single rows of a suspect, float32 [L, n, H]; None of any other sample."""
        if not rows or not self._suspects.get(key):
            return None
        pieces = self._suspects[key]
        length = max(start + piece.shape[1] for start, piece in pieces)
        whole_LTH = torch.full((pieces[0][1].shape[0], length, pieces[0][1].shape[2]), torch.nan)
        for start, piece in pieces:
            whole_LTH[:, start : start + piece.shape[1]] = piece
        return whole_LTH[:, rows].contiguous().numpy().astype("<f4").tobytes()

    def layertap_close(self) -> dict[str, float]:
        """Stop capturing.

        Returns:
            Seconds that the engine has waited for the copy to the host and for the writers, and what these did.
        """
        self._open = False
        self._transfer.close()
        return {"waited_for_copy": self._transfer.waited, **self._assembly.close()}


def _wanted(scheduler_output: Any) -> Iterator[Wanted]:
    """Samples among the requests that the engine begins with; each request says where it is to be staged."""
    for request in scheduler_output.scheduled_new_reqs:
        asked = getattr(request.sampling_params, "extra_args", None) or {}
        if "layertap" in asked:
            yield Wanted(sample_key(request.req_id), len(request.prompt_token_ids), **asked["layertap"])


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
