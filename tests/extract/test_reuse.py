"""Samples with reused rows, through the real engine: the same states as without, and every check passed.

One engine on one rank is made to forget: little host memory for rows, so that some are gone when the engine counts on
them, and a small KV cache with several prompts under way, so that some are preempted. One on two ranks deals the
samples over both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineSpec, Job
from tasks.layers import Layers
from tasks.model import Checkpoint, read
from tasks.plan.prefixes import arrange
from tasks.verify.config import Audit
from tasks.verify.examine import Examiner
from tasks.verify.reference import residual_states
from tasks.vocabulary import Identity, PlannedSample, Receipt, digest_ids
from tests.checkpoints import checkpoint_path

pytestmark = pytest.mark.engine

STAGE = "tasks.verify.solo:stage_array"
KV_BLOCK = 32
DEPTHS = (1, 3, 6)
TOLERANCE = 1e-5
COUNT = 1000
Samples = dict[str, npt.NDArray[np.int32]]


class AllAgain(Job):
    """Samples that read nothing from the KV cache: what they would be without reuse."""

    def __init__(self, directory: Path, samples: Samples) -> None:
        super().__init__(directory, samples)
        self._again = set(samples)


class CountingEngine(CaptureEngine):
    """Counts the preemptions of an engine that runs in this process."""

    preemptions = 0

    def _load(self) -> Any:
        vllm_engine = super()._load()
        if self.spec.engine.in_process:
            scheduler = vllm_engine.engine_core.engine_core.scheduler
            preempt = scheduler._preempt_request

            def counted(*args: Any, **kwargs: Any) -> Any:
                self.preemptions += 1
                return preempt(*args, **kwargs)

            scheduler._preempt_request = counted
        return vllm_engine


@dataclass
class Running:
    """An engine, and what it is to be judged by."""

    engine: CountingEngine
    checkpoint: Checkpoint
    identity: Identity
    directory: Path

    def run(self, samples: Samples, *, reuse: bool = True) -> dict[str, list[Receipt]]:
        """Capture samples in jobs of a few thousand tokens, in the plan's order where rows are reused."""
        planned = [PlannedSample(key, len(ids), (0,)) for key, ids in samples.items()]
        planned = arrange(planned, lambda sample: samples[sample.key]) if reuse else planned
        futures = []
        for start in range(0, len(planned), 50):
            part = planned[start : start + 50]
            ids = {sample.key: samples[sample.key] for sample in part}
            shared = {sample.key: sample.shared for sample in part}
            job = Job(self.directory, ids, shared=shared) if reuse else AllAgain(self.directory, ids)
            futures.append(self.engine.submit(job))
        return {key: found for future in futures for key, found in future.result(timeout=300).items()}

    def states(self, key: str) -> npt.NDArray[np.float32]:
        """What was staged of a sample [L, T, H]; taken away."""
        path = self.directory / f"{key}.npy"
        states_LTH: npt.NDArray[np.float32] = np.load(path)
        path.unlink()
        return states_LTH


@pytest.fixture(scope="module", params=[1, 2], ids=["forgetful", "tp2"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    size = request.param
    checkpoint = read(checkpoint_path("llama", size))
    small: dict[str, Any] = {
        "num_gpu_blocks_override": 24,
        "long_prefill_token_threshold": 64,
        "scheduler_reserve_full_isl": False,
    }
    engine = Engine(
        tensor_parallel_size=size,
        max_model_len=512,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_gib=0.1,
        in_process=size == 1,
        staging_gib=0.2,
        writer_threads=2,
        writing_ranks="all",
        reuse_prefixes="on",
        reuse_gib=0.0008 if size == 1 else 0.25,
        extra={"block_size": KV_BLOCK} | (small if size == 1 else {}),
    )
    identity = checkpoint.identity(Layers(ids=DEPTHS, convention="input"), "float32")
    spec = EngineSpec(checkpoint, DEPTHS, "float32", engine, STAGE, {}, reuse=True)
    started = CountingEngine(spec)
    started.start()
    try:
        yield Running(started, checkpoint, identity, tmp_path_factory.mktemp("staged"))
    finally:
        started.shutdown()


def family(identity: Identity, count: int, seed: int) -> Samples:
    """Samples that branch off from each other at any token; some are wholly the beginning of others."""
    random = np.random.default_rng(seed)
    found: Samples = {}
    earlier: list[npt.NDArray[np.int32]] = []
    while len(found) < count:
        known = earlier[random.integers(len(earlier))] if earlier and random.random() < 0.9 else np.zeros(0, np.int32)
        known = known[: random.integers(len(known) + 1)] if random.random() < 0.5 else known[:200]
        new = random.integers(1, 200 if not len(known) else 50) if random.random() < 0.9 or not len(known) else 0
        ids = np.concatenate([known, random.integers(0, 256, new, dtype=np.int32)])
        if len(ids) and identity.key(ids) not in found:
            found[identity.key(ids)] = ids
            earlier.append(ids)
    return found


def judged(running: Running, samples: Samples, receipts: Mapping[str, Sequence[Receipt]]) -> None:
    """Every check of the verification passes, the proof of the sampled token too."""
    size = running.engine.spec.engine.tensor_parallel_size
    examiner = Examiner(running.checkpoint, running.identity, size, Audit())
    planned = [PlannedSample(key, len(ids), (0,)) for key, ids in samples.items()]
    verdicts = examiner.examine(planned, receipts, {key: digest_ids(ids) for key, ids in samples.items()})
    assert [v for v in verdicts if not v.accepted] == []
    assert all(v.proof is not None and v.proof.outcome != "failed" for v in verdicts)


def far(a_LTH: npt.NDArray[np.float32], b_LTH: npt.NDArray[np.float32]) -> float:
    """Largest relative error of a row."""
    norm = np.linalg.norm(b_LTH, axis=-1)
    return float((np.linalg.norm(a_LTH - b_LTH, axis=-1) / norm).max())


def test_a_thousand_samples_are_what_they_are_without_reuse(running: Running) -> None:
    size = running.engine.spec.engine.tensor_parallel_size
    samples = family(running.identity, COUNT if size == 1 else COUNT // 4, seed=1)
    receipts = running.run(samples)
    judged(running, samples, receipts)
    with_reuse = {key: running.states(key) for key in samples}
    tokens = sum(map(len, samples.values()))
    reused = {key: sum(found[0].reused_from.values()) for key, found in receipts.items()}
    assert all(found[0].reused == other.reused for found in receipts.values() for other in found)
    assert all(rows < len(samples[key]) for key, rows in reused.items()), "the last row is always computed"
    assert any(rows == KV_BLOCK * ((len(samples[key]) - 1) // KV_BLOCK) > 0 for key, rows in reused.items())
    if size == 1:
        assert running.engine.recomputed > 0, "rows were gone, and their samples computed again"
        assert running.engine.preemptions, "the KV cache was too small"
        assert sum(reused.values()) > 0.1 * tokens
    else:
        assert running.engine.recomputed == 0
        assert sum(reused.values()) > 0.3 * tokens
        staged = [next(r.rank for r in found if r.objects is not None) for found in receipts.values()]
        assert set(staged) == {0, 1}
    print(
        f"{sum(reused.values())} of {tokens} rows reused, {running.engine.recomputed} samples computed again, "
        f"{running.engine.preemptions} preemptions"
    )

    without = running.run(samples, reuse=False)
    assert all(found[0].reused == () for found in without.values())
    errors = {key: far(with_reuse[key], running.states(key)) for key in samples}
    assert max(errors.values()) < TOLERANCE


def test_a_suspect_neither_reads_nor_leaves_anything_behind(running: Running) -> None:
    samples = family(running.identity, 12, seed=2)
    running.run(samples)
    alone = next(iter(samples))
    (suspect,) = running.engine.submit(Job(running.directory, {alone: samples[alone]}, suspect=True)).result().values()
    assert all(receipt.reused == () for receipt in suspect)
    # The KV cache was cleared: whoever still counted on it would compute nonsense.
    again = {running.identity.key(longer): longer for ids in samples.values() for longer in [np.append(ids, 9)]}
    again = {key: ids.astype(np.int32) for key, ids in again.items()}
    judged(running, again, running.run(again))
    for key, ids in again.items():
        reference_LTH = residual_states(running.checkpoint.path, ids, DEPTHS)
        assert far(running.states(key), torch.as_tensor(reference_LTH).numpy()) < 1e-4
