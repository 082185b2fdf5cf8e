"""vLLM's own ``extract_hidden_states``, as the peer to measure extraction beside.

As shipped its connector copies with CUDA streams; on a CPU, where the states are in host memory already, a subclass
leaves the copy out and writes the same files by the same threads.
"""

import fcntl
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract.config import Engine
from tasks.model import Checkpoint
from tasks.vocabulary import DType


class NativeEngine:
    """A running engine that leaves each prompt's hidden states in a file; only rank 0 writes them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        depths: tuple[int, ...],
        dtype: DType,
        engine: Engine,
        directory: Path,
        *,
        prefix_caching: bool,
    ) -> None:
        os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_V2_MODEL_RUNNER": "0"}  # it knows V1 only
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        on_cpu = not torch.cuda.is_available()
        connector: dict[str, Any] = {"kv_connector": "ExampleHiddenStatesConnector"}
        arguments: dict[str, Any] = {"distributed_executor_backend": "mp" if engine.tensor_parallel_size > 1 else "uni"}
        if on_cpu:
            connector = {"kv_connector": "HostConnector", "kv_connector_module_path": __name__}
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        if engine.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * 2**30)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(checkpoint.path),
                dtype=dtype,
                tensor_parallel_size=engine.tensor_parallel_size,
                max_model_len=engine.max_model_len,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_num_seqs=engine.max_num_seqs,
                gpu_memory_utilization=engine.gpu_memory_utilization,
                enforce_eager=True,
                load_format=engine.load_format,
                skip_tokenizer_init=True,
                enable_prefix_caching=prefix_caching,
                disable_log_stats=True,
                seed=0,
                speculative_config={
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(depths)}},
                },
                kv_transfer_config={
                    **connector,
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": str(directory)},
                },
                **arguments,
                **engine.extra,
            )
        )

    def run(self, samples: Mapping[str, npt.NDArray[np.int32]]) -> float:
        """Extract; returns the seconds until the last file is on the disk, as a commit is."""
        from vllm import SamplingParams

        began = time.perf_counter()
        for key, ids in samples.items():
            parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            self.engine.add_request(key, {"prompt_token_ids": ids.tolist()}, parameters)
        paths = []
        while self.engine.has_unfinished_requests():
            paths += [o.kv_transfer_params["hidden_states_path"] for o in self.engine.step() if o.finished]
        assert len(paths) == len(samples)
        core = getattr(self.engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():  # in this process, nobody else goes on with the saves
            self.engine.step()
        while not all(Path(f"{path}.lock").exists() for path in paths):
            time.sleep(0.001)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(_flush, paths))
        return time.perf_counter() - began

    def reset(self) -> None:
        """Forget all prefixes, with no request under way."""
        assert self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        self.engine.engine_core.shutdown()


def _flush(path: str) -> None:
    with Path(f"{path}.lock").open() as lock:  # its writer holds the lock until the file is whole
        fcntl.flock(lock, fcntl.LOCK_SH)
    with Path(path).open("rb") as file:
        os.fsync(file.fileno())


class _Done:
    """Stands for the event of a copy that was never needed."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def __getattr__(name: str) -> Any:
    """The connector for CPUs, made when vLLM asks for it: its base must be imported in the engine's process only."""
    if name != "HostConnector":
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as shipped

    class HostConnector(shipped.ExampleHiddenStatesConnector):  # type: ignore[misc]
        def _submit_async_write(self, pending: Any) -> None:
            if not self._is_tp_rank_zero:
                return
            blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
            slots = (blocks + torch.arange(self._block_size)).flatten()
            states = shipped.extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).contiguous()
            tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
            lock = self._lock_fds.pop(pending.req_id, None)
            future = self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, lock)
            self._req_copy_events[pending.req_id] = _Done()
            self._req_futures[pending.req_id] = future
            future.add_done_callback(partial(self._on_write_done, pending.req_id))

    return HostConnector
