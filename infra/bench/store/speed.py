"""How much the store costs beside its codec: writing, reading, small samples, DataLoader workers.

``python -m infra.bench.store.speed [--place DIR] [--rounds 7]``; the place should be a disk like the one in use.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from numcodecs import blosc
from torch.utils.data import DataLoader

import tasks.store
from infra.bench.store.common import alternate, bench_identity, heavy_tailed, print_machine, ratio
from tasks.store import SourceRecord, StagedSample, Store, blosc_frame
from tasks.store.dataset import Batch, LengthBucketedBatches, SampleDataset, collate
from tasks.store.layout import chunk_tokens
from tasks.store.stage import stage_states

CHUNKS, SAMPLES, T, H = 4, 8, 512, 7168
CHUNK_TOKENS = chunk_tokens(H)


def write(place: Path, rounds: int, threads: int) -> None:
    """Chunks of samples, each committed beside the staging of the next as a run does, and the last one waited for."""
    identity = bench_identity(H)
    samples = [heavy_tailed(4, T, H, seed) for seed in range(4)] * (SAMPLES // 4)
    ids = [np.random.default_rng(i).integers(0, 1000, T, dtype=np.int32) for i in range(CHUNKS * SAMPLES)]
    with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(1) as committer:

        def encode(i: int, codec: Callable[[Any], bytes]) -> Iterator[bytes]:
            for plane in samples[i % SAMPLES]:
                for start in range(0, T, CHUNK_TOKENS):
                    payload = codec(plane[start : start + CHUNK_TOKENS])
                    google_crc32c.value(payload)
                    yield payload

        def stock(chunk: Any) -> bytes:
            return bytes(blosc.compress(chunk, b"zstd", 1, blosc.SHUFFLE, 1 << 20, 2))

        def own(chunk: Any) -> bytes:
            return b"".join(blosc_frame.compress(chunk, shuffle=True))

        def bare(codec: Callable[[Any], bytes]) -> None:
            for _ in pool.map(lambda i: sum(map(len, encode(i, codec))), range(CHUNKS * SAMPLES)):
                pass

        def store() -> None:
            url = Path(tempfile.mkdtemp(dir=place))
            removed.append(url)
            with Store.open(url, identity) as opened:

                def stage(i: int) -> StagedSample:
                    key = identity.key(ids[i])
                    objects = stage_states(opened.staging(), key, opened.spec, samples[i % SAMPLES], ids[i])
                    return StagedSample(key, T, objects, np.ones(T, dtype=bool))

                def commit(staged: list[StagedSample]) -> None:
                    opened.commit(staged)
                    opened.record()

                commits = [
                    committer.submit(commit, list(pool.map(stage, range(first, first + SAMPLES))))
                    for first in range(0, CHUNKS * SAMPLES, SAMPLES)
                ]
                for each in commits:
                    each.result()

        def files() -> None:
            url = Path(tempfile.mkdtemp(dir=place))
            removed.append(url)
            for number, payload in enumerate(encoded * CHUNKS):
                (url / str(number)).write_bytes(payload)
            os.sync()

        removed: list[Path] = []
        encoded = [payload for i in range(SAMPLES) for payload in encode(i, own)]
        ways: dict[str, Callable[[], object]] = {
            "stock": lambda: bare(stock),
            "bare": lambda: bare(own),
            "store": store,
            "files": files,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, taken in alternate(ways, 1).items():
                seconds[name] += taken
                while removed:
                    shutil.rmtree(removed.pop())
                os.sync()
    raw = CHUNKS * SAMPLES * samples[0].nbytes / 1e6
    speeds = {name: raw / float(np.median(taken)) for name, taken in seconds.items()}
    print(
        f"write, {threads} thread(s), [4, {T}, {H}]: store {speeds['store']:.0f} MB/s, blosc(zstd 1) bare "
        f"{speeds['stock']:.0f} MB/s, ratio {ratio(seconds['stock'], seconds['store']):.2f} (>= 0.80); the store's own "
        f"encoder bare {speeds['bare']:.0f} MB/s, ratio {ratio(seconds['bare'], seconds['store']):.2f}; "
        f"the place takes the encoded bytes of {speeds['files']:.0f} MB/s, written and synced"
    )


def fill(url: Path, samples: int) -> None:
    identity = bench_identity(H)
    with Store.open(url, identity) as opened:
        for i in range(samples):
            ids = np.random.default_rng(i).integers(0, 1000, T, dtype=np.int32)
            key = identity.key(ids)
            objects = stage_states(opened.staging(), key, opened.spec, heavy_tailed(4, T, H, i % 4), ids)
            opened.commit([StagedSample(key, T, objects, np.ones(T, dtype=bool))])
            opened.record([SourceRecord(f"s{i}", key, np.ones(T, dtype=bool))])


def read(place: Path, rounds: int) -> None:
    url = Path(tempfile.mkdtemp(dir=place))
    fill(url, SAMPLES)
    reader = tasks.store.open(url)
    files = [[p.read_bytes() for p in sorted(url.glob(f"samples/*/{key}/hidden_states/c.*"))] for key in reader.keys]

    def bare() -> None:
        for chunks in files:
            for data in chunks:
                google_crc32c.value(data)
                blosc.decompress(memoryview(data)[:-4], np.empty((1, CHUNK_TOKENS, H), dtype=np.uint16))

    def whole() -> None:
        for key in reader.keys:
            reader.read(key)

    def one_depth() -> None:
        for key in reader.keys:
            reader.read(key, depths=[31])

    whole()
    seconds = alternate({"bare": bare, "whole": whole, "one depth": one_depth}, rounds)
    raw = SAMPLES * 4 * T * H * 2 / 1e6
    print(
        f"read, 1 thread: whole samples {raw / np.median(seconds['whole']):.0f} MB/s, decode bare "
        f"{raw / np.median(seconds['bare']):.0f} MB/s, ratio {ratio(seconds['bare'], seconds['whole']):.2f} (>= 0.80); "
        f"one depth of four takes {ratio(seconds['one depth'], seconds['whole']):.2f} of the whole"
    )
    shutil.rmtree(url)


def small(place: Path, rounds: int) -> None:
    """Samples a second of one process, with one and two threads that stage, and one that commits, as a run has."""
    identity = bench_identity(576)
    states, count, chunk = heavy_tailed(4, 64, 576), 600, 100
    for threads in (1, 2):
        rates, busy = [], []
        for _ in range(rounds):
            url = Path(tempfile.mkdtemp(dir=place))
            with (
                Store.open(url, identity) as opened,
                ThreadPoolExecutor(threads) as encoders,
                ThreadPoolExecutor(1) as committer,
            ):

                def stage(i: int, store: Store = opened) -> StagedSample:
                    ids = np.arange(i, i + 64, dtype=np.int32)
                    key = identity.key(ids)
                    objects = stage_states(store.staging(), key, store.spec, states, ids)
                    return StagedSample(key, 64, objects, np.ones(64, dtype=bool), 1, (f"s{i}",))

                def commit(staged: list[StagedSample], store: Store = opened) -> None:
                    store.commit(staged)
                    store.record(SourceRecord(name, s.key, s.loss_mask) for s in staged for name in s.sources)

                start, cpu = time.perf_counter(), time.process_time()
                commits = []
                for first in range(0, count, chunk):
                    commits.append(committer.submit(commit, list(encoders.map(stage, range(first, first + chunk)))))
                for done in commits:
                    done.result()
                rates.append(count / (time.perf_counter() - start))
                busy.append(count / (time.process_time() - cpu))
            shutil.rmtree(url)
        print(
            f"small samples [4, 64, 576], one process, {threads} thread(s), durable: {np.median(rates):.0f} a second "
            f"(>= 400); {np.median(busy):.0f} a second of processor time"
        )


def loader(place: Path, rounds: int) -> None:
    """Batches of two samples, one worker and two in turn, for a consumer that takes them and one that copies them.

    With one worker the main process works beside it; with two on two processors, all three share these. So two take at
    best 2 W / (W + M) times as much as one, W and M being the processor time of workers and main process. A copy is
    what a trainer's main process does with a batch: to pinned memory or to the device.
    """
    url = Path(tempfile.mkdtemp(dir=place))
    fill(url, 24)
    data = SampleDataset(url)
    torch.set_num_threads(1)
    copied = torch.empty(2, 4, T, H, dtype=torch.bfloat16)
    loaders = {
        workers: DataLoader(
            data,
            batch_sampler=LengthBucketedBatches(data.lengths, 2 * T),
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
        for workers in (1, 2)
    }
    consumers: dict[str, Callable[[Batch], object]] = {
        "takes": lambda batch: batch["hidden_states"].shape,
        "copies": lambda batch: copied.copy_(batch["hidden_states"]),
    }
    for verb, consume in consumers.items():
        seconds: dict[int, list[float]] = {1: [], 2: []}
        busy: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for turn in range(rounds + 1):
            for workers, made in loaders.items():
                start, main, children = time.perf_counter(), time.process_time(), _busy_children()
                for batch in made:
                    consume(batch)
                if turn:  # the first turn starts the workers
                    seconds[workers].append(time.perf_counter() - start)
                    busy[workers].append((_busy_children() - children, time.process_time() - main))
        of_workers, of_main = (statistics.median(times) for times in zip(*busy[2], strict=True))
        raw = 24 * 4 * T * H * 2 / 1e6
        print(
            f"DataLoader, batches [2, 4, {T}, {H}], the main process {verb} them: "
            f"{raw / np.median(seconds[1]):.0f} MB/s with one worker, {raw / np.median(seconds[2]):.0f} with two, "
            f"ratio {ratio(seconds[1], seconds[2]):.2f} (>= 1.60 where it takes them); processor time a sample "
            f"{1e3 * of_workers / 24:.1f} ms in workers, {1e3 * of_main / 24:.1f} ms in the main process, which allows "
            f"{2 * of_workers / (of_workers + of_main):.2f} on two processors"
        )
    spin = alternate({"one": _spin(1), "two": _spin(2)}, rounds)
    print(f"  two threads of bare decoding do {2 * ratio(spin['one'], spin['two']):.2f} times the work of one here")
    shutil.rmtree(url)


def _busy_children() -> float:
    """Seconds of processor time that this process's children have taken, on Linux."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _spin(threads: int) -> Callable[[], None]:
    """Decode without any input or output: what a second core is worth on this machine now."""
    data = blosc.compress(heavy_tailed(4, CHUNK_TOKENS, H), b"zstd", 1, blosc.SHUFFLE, 1 << 20, 2)

    def work(_: int) -> None:
        target = np.empty((4, CHUNK_TOKENS, H), dtype=np.uint16)
        for _ in range(20):
            blosc.decompress(data, target)

    def action() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))

    return action


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["write", "read", "small", "loader"])
    args = parser.parse_args()
    print_machine()
    print(f"place: {args.place}")
    if args.only in (None, "write"):
        for number in (1, 2):
            write(args.place, args.rounds, number)
    if args.only in (None, "read"):
        read(args.place, args.rounds)
    if args.only in (None, "small"):
        small(args.place, args.rounds)
    if args.only in (None, "loader"):
        loader(args.place, args.rounds)
