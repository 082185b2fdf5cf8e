"""How long a rerun takes to find that everything is there: ``Store.open`` and ``missing`` over many samples.

``python -m infra.bench.store.planning [--samples 100000] [--s3]``. The samples are real in all that planning looks
at: directories, files, sizes and manifest, the files being hard links of a few; or, on the S3 server, where so many
are looked up by name, the completion record of each.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from infra.bench.store.common import bench_identity, heavy_tailed, print_machine
from tasks.store import SourceRecord, StagedSample, Store
from tasks.store.layout import RECORD, group_document, parse_record, sample_path
from tasks.store.manifest import Batch, Entry, ManifestWriter, Source
from tasks.store.stage import stage_states

IDENTITY = bench_identity(576)
TOKENS = 64
PER_SEGMENT = 500


def keys(samples: int) -> list[str]:
    return [IDENTITY.key(np.array([i, 1, 2, 3], dtype=np.int32)) for i in range(samples)]


def build(url: str, samples: int) -> None:
    """Make the store: one sample by the usual way, the others as copies of its files under their own keys."""
    with Store.open(url, IDENTITY, run="build") as store:
        first = IDENTITY.key(np.arange(TOKENS))
        objects = stage_states(
            store.staging(), first, store.spec, heavy_tailed(4, TOKENS, 576), np.arange(TOKENS, dtype=np.int32)
        )
        mask = np.ones(TOKENS, dtype=bool)
        store.commit([StagedSample(first, TOKENS, objects, mask)])
        store.record([SourceRecord("first", first, mask)])
        backend, files = store.backend, store.spec.files(TOKENS)
        entry = Entry.of(parse_record(backend.read(f"{sample_path(first)}/{RECORD}"), store.spec))
        all_keys = keys(samples)
        backend.put_all({f"samples/{key[:2]}/{RECORD}": group_document() for key in all_keys})
        if "://" in url:
            record = backend.read(f"{sample_path(first)}/{RECORD}")

            def upload(key: str) -> None:
                backend.put(f"{sample_path(key)}/{RECORD}", record)

            with ThreadPoolExecutor(16) as pool:
                for number, _ in enumerate(pool.map(upload, all_keys)):
                    if number % 5000 == 0:
                        print(f"  built {number}", file=sys.stderr, flush=True)
        else:
            link(Path(url), sample_path(first), files, all_keys)
        manifest = ManifestWriter(backend, "build")
        for start in range(0, samples, PER_SEGMENT):
            part = all_keys[start : start + PER_SEGMENT]
            manifest.append(
                Batch(dict.fromkeys(part, entry), {f"chat-{start + i}": Source(key) for i, key in enumerate(part)})
            )


def link(root: Path, first: str, files: tuple[str, ...], all_keys: list[str]) -> None:
    base = root / first
    for number, key in enumerate(all_keys):
        if number % 50_000 == 49_999:  # a file system allows a file so many names
            base = root / ".layertap" / f"base-{number}"
            shutil.copytree(root / first, base)
        directory = root / sample_path(key)
        for name in ("hidden_states", "input_ids", "loss_mask"):
            (directory / name).mkdir(parents=True)
        for file in files:
            os.link(base / file, directory / file)


def resident() -> int:
    """Bytes of memory in use now; the peak that the system reports includes the parent's."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plan(url: str, samples: int) -> None:
    """The measured process: open for writing, ask what is missing."""
    planned = [(key, TOKENS) for key in keys(samples)]
    before = resident()
    start, cpu = time.perf_counter(), time.process_time()
    with Store.open(url, IDENTITY, run="plan") as store:
        opened = time.perf_counter()
        missing = store.missing(planned)
        done = time.perf_counter()
    after = resident()
    print(
        f"{samples} samples: {done - start:.2f} s (manifest {opened - start:.2f}, files {done - opened:.2f}), "
        f"processor {time.process_time() - cpu:.2f} s; {len(missing)} missing, memory +{(after - before) >> 20} MiB"
    )
    assert not missing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        plan(args.plan, args.samples)
        sys.exit()
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        if args.s3:
            from tests.store.s3_server import BUCKET, s3_server

            with s3_server(Path(directory)) as environment:
                os.environ.update(environment)
                place = f"s3://{BUCKET}/plan"
                build(place, args.samples)
                for _ in range(3):
                    subprocess.run(
                        [sys.executable, "-m", __spec__.name, "--samples", str(args.samples), "--plan", place]
                    )
        else:
            place = f"{directory}/store"
            build(place, args.samples)
            for _ in range(5):
                for count in (args.samples // 10, args.samples):
                    subprocess.run([sys.executable, "-m", __spec__.name, "--samples", str(count), "--plan", place])
