"""Samples extracted again, each alone in the engine: what batches and prefill chunks may have mixed up shows."""

import tempfile
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineSpec, Job
from tasks.model import Checkpoint
from tasks.verify.audit import AuditError
from tasks.vocabulary import Identity

STAGE = "tasks.verify.solo:stage_array"  # by name, since it runs in the engine's worker processes


def stage_array(
    directory: Path,
    key: str,
    _spec: Mapping[str, Any],
    states_LTH: npt.NDArray[Any],
    _ids: npt.NDArray[np.int32],
    _executor: Executor,
) -> dict[str, tuple[int, int]]:
    """Keep the states of one sample as a plain array."""
    np.save(directory / f"{key}.npy", states_LTH)
    return {}


class Solo:
    """An engine that recomputes samples one at a time; a context manager."""

    def __init__(self, checkpoint: Checkpoint, identity: Identity, engine: Engine) -> None:
        self._dtype = identity.dtype
        self._engine = CaptureEngine(EngineSpec(checkpoint, identity.depths, identity.dtype, engine, STAGE, {}))
        self._directory = tempfile.TemporaryDirectory(prefix="layertap-solo-")

    def __enter__(self) -> "Solo":
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.shutdown()
        self._directory.cleanup()

    def __call__(self, key: str, ids_T: npt.NDArray[np.int32]) -> torch.Tensor:
        """Float32 [L, T, H].

        Raises:
            AuditError: the engine could not compute it.
        """
        directory = Path(self._directory.name)
        receipts = self._engine.submit(Job(directory, {key: ids_T})).result()[key]
        if faults := [receipt.error for receipt in receipts if receipt.error]:
            raise AuditError(f"sample {key[:12]} could not be extracted again: {faults[0]}")
        path = directory / f"{key}.npy"
        states = torch.from_numpy(np.load(path))
        path.unlink()
        return states if self._dtype == "float32" else states.view(torch.bfloat16).float()
