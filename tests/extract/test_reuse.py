"""Samples with reused rows, through the real engine: the same states as without, and every check passed.

One engine on one rank is made to forget: little host memory for rows, so that some are gone when the engine counts on
them, and a small KV cache with several prompts under way, so that some are preempted. One on two ranks deals the
samples over both. Chunks of the store are small, so that most samples link to some of others.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tasks.extract import staged_rows
from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineSpec, Job
from tasks.layers import Layers
from tasks.model import Checkpoint, read
from tasks.plan.prefixes import arrange
from tasks.store import StagedSample, Store, layout
from tasks.store import open as open_store
from tasks.store.maintenance import stats
from tasks.verify.config import Audit
from tasks.verify.examine import Examiner
from tasks.verify.reference import residual_states
from tasks.vocabulary import Identity, PlannedSample, Receipt, digest_ids
from tests.checkpoints import checkpoint_path
from tests.extract import small_chunks

pytestmark = pytest.mark.engine

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
    """An engine, what it is to be judged by, and where its samples are committed."""

    engine: CountingEngine
    checkpoint: Checkpoint
    identity: Identity
    directory: Path
    linked: list[int] = field(default_factory=list)
    """Rows of samples that were found in staged files; known only of an engine in this process."""

    def run(self, samples: Samples, name: str, *, reuse: bool = True) -> dict[str, list[Receipt]]:
        """Capture samples in jobs of a few thousand tokens, in the plan's order where rows are reused, and commit them
        to the store of this name."""
        planned = [PlannedSample(key, len(ids), (0,)) for key, ids in samples.items()]
        planned = arrange(planned, lambda sample: samples[sample.key]) if reuse else planned
        receipts: dict[str, list[Receipt]] = {}
        with Store.open(self.directory / name, self.identity) as store:
            futures = []
            for start in range(0, len(planned), 50):
                part = planned[start : start + 50]
                ids = {sample.key: samples[sample.key] for sample in part}
                shared = {sample.key: sample.shared for sample in part}
                job = Job(store.staging(), ids, shared=shared) if reuse else AllAgain(store.staging(), ids)
                futures.append(self.engine.submit(job))
            for future in futures:
                receipts |= future.result(timeout=300)
            objects = {key: next(r.objects for r in found if r.objects) for key, found in receipts.items()}
            masks = {key: np.ones(len(ids), bool) for key, ids in samples.items()}
            store.commit([StagedSample(key, len(samples[key]), objects[key], masks[key]) for key in samples])
            store.record()
        return receipts

    def states(self, name: str) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Key and states [L, T, H] of the samples in a store."""
        reader = open_store(self.directory / name)
        return ((key, reader[key].states_LTH) for key in reader.keys)


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "chunk_tokens", small_chunks.few)
        layout._templates.cache_clear()
        yield
    layout._templates.cache_clear()


@pytest.fixture(scope="module", params=[1, 2], ids=["forgetful", "tp2"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small: None) -> Iterator[Running]:
    size = request.param
    checkpoint = read(checkpoint_path("llama", size))
    tight: dict[str, Any] = {
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
        extra=tight if size == 1 else {},
    )
    identity = checkpoint.identity(Layers(ids=DEPTHS, convention="input"), "float32")
    directory = tmp_path_factory.mktemp("stores")
    with Store.open(directory / "reused", identity) as store:
        spec = EngineSpec(checkpoint, DEPTHS, "float32", engine, small_chunks.STAGE, store.stage_spec(), reuse=True)
    started = CountingEngine(spec)
    running = Running(started, checkpoint, identity, directory)
    with pytest.MonkeyPatch.context() as patch:
        find = staged_rows.StagedPrefixes.find

        def counted(*args: Any) -> list[staged_rows.StagedRows]:
            found = find(*args)
            running.linked.append(sum(rows.stop - rows.start for rows in found))
            return found

        patch.setattr(staged_rows.StagedPrefixes, "find", counted)
        started.start()
        try:
            yield running
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
    receipts = running.run(samples, "reused")
    judged(running, samples, receipts)
    tokens = sum(map(len, samples.values()))
    reused = {key: sum(found[0].reused_from.values()) for key, found in receipts.items()}
    assert all(found[0].reused == other.reused for found in receipts.values() for other in found)
    assert all(rows < len(samples[key]) for key, rows in reused.items()), "the last row is always computed"
    assert any(rows == KV_BLOCK * ((len(samples[key]) - 1) // KV_BLOCK) > 0 for key, rows in reused.items())
    if size == 1:
        assert running.engine.recomputed > 0, "rows were gone, and their samples computed again"
        assert running.engine.preemptions, "the KV cache was too small"
        assert sum(reused.values()) > 0.1 * tokens
        assert sum(running.linked) > 0.02 * tokens
    else:
        assert running.engine.recomputed == 0
        assert sum(reused.values()) > 0.3 * tokens
        staged = [next(r.rank for r in found if r.objects is not None) for found in receipts.values()]
        assert set(staged) == {0, 1}
    found = stats(running.directory / "reused")
    assert found.disk_bytes < found.stored_bytes
    print(
        f"{sum(reused.values())} of {tokens} rows reused, {sum(running.linked)} of them linked to, "
        f"{running.engine.recomputed} samples computed again, {running.engine.preemptions} preemptions"
    )

    without = running.run(samples, "computed", reuse=False)
    assert all(found[0].reused == () for found in without.values())
    pairs = zip(running.states("reused"), running.states("computed"), strict=True)
    errors = {}
    for (key, reused_LTH), (other, computed_LTH) in pairs:
        assert key == other
        errors[key] = far(reused_LTH, computed_LTH)
    assert errors.keys() == samples.keys()
    assert max(errors.values()) < TOLERANCE


def test_a_prefix_is_reused_in_smaller_blocks_than_vllm_has_on_a_cpu(running: Running) -> None:
    assert running.engine.ranks[0]["kv_block"] == KV_BLOCK < 128


def test_a_suspect_neither_reads_nor_leaves_anything_behind(running: Running) -> None:
    samples = family(running.identity, 12, seed=2)
    running.run(samples, "before")
    alone = next(iter(samples))
    with Store.open(running.directory / "suspect", running.identity) as store:
        job = Job(store.staging(), {alone: samples[alone]}, suspect=True)
        (suspect,) = running.engine.submit(job).result().values()
    assert all(receipt.reused == () for receipt in suspect)
    # The KV cache was cleared: whoever still counted on it would compute nonsense.
    again = {running.identity.key(longer): longer for ids in samples.values() for longer in [np.append(ids, 9)]}
    again = {key: ids.astype(np.int32) for key, ids in again.items()}
    judged(running, again, running.run(again, "after"))
    for key, states_LTH in running.states("after"):
        reference_LTH = residual_states(running.checkpoint.path, again[key], DEPTHS)
        assert far(states_LTH, torch.as_tensor(reference_LTH).numpy()) < 1e-4


def test_samples_whose_linked_rows_are_gone_are_computed_again(running: Running) -> None:
    """As when `layertap gc` runs meanwhile, or somebody has removed the links."""
    random = np.random.default_rng(3)
    prefix = random.integers(0, 256, 3 * KV_BLOCK, dtype=np.int32)
    longer = [np.append(prefix, random.integers(0, 256, 8, dtype=np.int32)).astype(np.int32) for _ in range(8)]
    named = {running.identity.key(ids): ids for ids in longer}
    parts = [dict(list(named.items())[:4]), dict(list(named.items())[4:])]
    running.run(parts[0], "linked")
    before = running.engine.recomputed
    shutil.rmtree(running.engine.spec.stage_spec["links"])
    receipts = running.run(parts[1], "linked")
    judged(running, parts[1], receipts)
    assert running.engine.recomputed > before
    for key, states_LTH in running.states("linked"):
        reference_LTH = residual_states(running.checkpoint.path, named[key], DEPTHS)
        assert far(states_LTH, torch.as_tensor(reference_LTH).numpy()) < 1e-4
