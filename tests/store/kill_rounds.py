"""Kill a run at random moments, again and again, and check what it leaves.

A victim process stages, commits and records samples whose content is known; it is killed with SIGKILL, and the
store is examined: no wrong or half sample may be visible, and what was committed may not be extracted again. After
the last round a run is left alone, and nothing may be missing. Several victims may fill the store together, each a
share of the keys; some are killed, the others go on.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np

import tasks.store
from tasks.store import Share, SourceRecord, Store
from tasks.store.backend import open_backend
from tasks.store.integrity import checked_files, load_record
from tasks.store.layout import RECORD, StateSpec, sample_path
from tasks.store.maintenance import stats, verify
from tests.store.samples import OWN, Made, identity, make, stage

IDENTITY = identity(hidden_size=256)
SPEC = StateSpec.of(IDENTITY)
SAMPLES = 40
FAMILIES, MEMBERS = 2, 6
CHUNK = 4


def samples() -> list[Made]:
    """Samples of all lengths, and between them families that share chunks: in a local store, links to one file."""
    alone = [make(IDENTITY, 40 + 11 * i, seed=i) for i in range(SAMPLES)]
    shared = SPEC.chunk_tokens + 30
    related = [
        make(IDENTITY, shared + OWN, seed=100 + i, family=family) for i in range(MEMBERS) for family in range(FAMILIES)
    ]
    return [sample for pair in zip_longest(alone, related) for sample in pair if sample is not None]


def victim(url: str, log: Path, number: int = 0, shares: int = 1) -> None:
    """One run over all samples, or over one share of them; each extraction is noted before it begins."""
    planned = {s.key: s for s in samples()[number::shares]}
    share = Share("victims", f"share-{number}") if shares > 1 else None
    with (
        Store.open(url, IDENTITY, run="victim", share=share, wait_s=30) as store,
        log.open("a", buffering=1) as extracted,
        ThreadPoolExecutor(2) as pool,
    ):
        print("ready", flush=True)
        missing = store.missing([(key, len(s.input_ids)) for key, s in planned.items()])
        for start in range(0, len(missing), CHUNK):
            keys = missing[start : start + CHUNK]
            for key in keys:
                extracted.write(key + "\n")
            store.commit(list(pool.map(lambda key: stage(store, planned[key], (f"of {key}",)), keys)))
            store.record(SourceRecord(f"of {key}", key, planned[key].loss_mask) for key in keys)
        store.record(SourceRecord(f"of {key}", key, s.loss_mask) for key, s in planned.items())


@dataclass
class Outcome:
    """What the rounds found; everything but the first three must be empty or zero."""

    rounds: int = 0
    kills: int = 0
    stores: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.lost or self.twice or self.leftovers)


def visible(url: str, expected: dict[str, Made], outcome: Outcome) -> set[str]:
    """Keys that a reader sees; notes those whose content is not what it should be."""
    backend = open_backend(url)
    found = set()
    for key, sample in expected.items():
        if RECORD not in backend.names(sample_path(key)):
            continue
        found.add(key)
        try:
            record = load_record(backend, key, IDENTITY)
            for _ in checked_files(backend, record):
                pass
            states = tasks.store.open(url).read(key).states_LTH
            if not np.array_equal(states, sample.states):
                outcome.wrong.append(key)
        except Exception as error:
            outcome.wrong.append(f"{key}: {error}")
    return found


def play(url: str, rounds: int, seed: int = 0, longest_s: float = 0.6, shares: int = 1) -> Outcome:
    """Play the rounds; ``url`` gets a number appended whenever a store is complete and a fresh one begins."""
    dice = random.Random(seed)
    expected = {s.key: s for s in samples()}
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as directory:
        while outcome.rounds < rounds:
            outcome.stores += 1
            place = f"{url}-{outcome.stores}"
            log = Path(directory) / f"{outcome.stores}.log"
            committed: set[str] = set()
            read = 0

            def examine(place: str = place, log: Path = log) -> None:
                nonlocal committed, read
                lines = log.read_text().splitlines()
                outcome.twice.extend(committed.intersection(lines[read:]))
                read = len(lines)
                if "zarr.json" in open_backend(place).names(""):
                    now = visible(place, expected, outcome)
                    outcome.lost.extend(committed - now)
                    committed = now

            log.touch()
            while outcome.rounds < rounds and len(committed) < len(expected):
                outcome.rounds += 1
                with ExitStack() as stack:
                    victims = [stack.enter_context(_start(place, log, n, shares)) for n in range(shares)]
                    # A kill before the store is open is a moment like any other, now and then.
                    if dice.random() < 0.9:
                        assert victims[0].stdout is not None
                        victims[0].stdout.readline()
                    time.sleep(dice.uniform(0, longest_s))
                    for process in dice.sample(victims, dice.randint(1, shares)):
                        if process.poll() is None:
                            process.send_signal(signal.SIGKILL)
                            outcome.kills += 1
                    for process in victims:
                        process.communicate()  # those that were not killed go on to their end
                examine()
            with ExitStack() as stack:
                victims = [stack.enter_context(_start(place, log, n, shares)) for n in range(shares)]
                for process in victims:
                    process.communicate()
                    if process.returncode:
                        outcome.lost.append(f"the last run of {place} failed with status {process.returncode}")
            examine()
            outcome.lost.extend(expected.keys() - committed)
            reader = tasks.store.open(place)
            outcome.lost.extend(f"of {key}" for key in expected if f"of {key}" not in reader.source_ids)
            if "://" not in place and stats(place).disk_bytes >= stats(place).stored_bytes:
                outcome.wrong.append(f"no sample of {place} shares a chunk with another")
            checked = verify(place)
            outcome.wrong.extend([*checked.damaged, *checked.store_problems, *checked.unrecorded])
            outcome.leftovers.extend([*checked.leftovers, *open_backend(place).names(".layertap/staging")])
            if "://" not in place:
                shutil.rmtree(place)
    return outcome


def _start(url: str, log: Path, number: int, shares: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.store.kill_rounds", "--victim", url, str(log)]
    command += ["--share", str(number), str(shares)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--victim", nargs=2, required=True)
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1))
    arguments = parser.parse_args()
    place, log_path = arguments.victim
    victim(place, Path(log_path), *arguments.share)
