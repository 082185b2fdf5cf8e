"""Kill rounds, a disk that fills up, and two runs at once, against a local store and a real S3 server.

``python -m infra.bench.store.crashes [--rounds 100]``. The full disk needs the right to mount a tmpfs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from infra.bench.store.common import print_machine
from tasks.store import StorageFailure, Store
from tasks.store.maintenance import verify
from tests.store.kill_rounds import IDENTITY, play, samples
from tests.store.s3_server import BUCKET, s3_server
from tests.store.samples import stage


def kill(url: str, rounds: int, shares: int = 1) -> None:
    start = time.perf_counter()
    outcome = play(url, rounds, shares=shares)
    print(
        f"{outcome.rounds} rounds of {shares} writers on {url.split('/')[0] or 'a local disk'}, {outcome.kills} kills, "
        f"{outcome.stores} stores filled: {len(outcome.wrong)} wrong or half samples, {len(outcome.lost)} lost, "
        f"{len(outcome.twice)} extracted twice, {len(outcome.leftovers)} leftovers; {time.perf_counter() - start:.0f} s"
    )
    assert outcome.clean, outcome


def full_disk() -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", place], check=True)
        try:
            made = {s.key: s for s in samples()}
            planned = [(key, len(s.input_ids)) for key, s in made.items()]

            def run() -> int:
                with Store.open(place / "store", IDENTITY) as store:
                    missing = store.missing(planned)
                    for key in missing:
                        store.commit([stage(store, made[key])])
                        store.record()
                return len(missing)

            try:
                run()
                raise AssertionError("the disk did not fill up")
            except StorageFailure as failure:
                message = str(failure).replace(directory, "DISK")
            checked = verify(place / "store")
            assert checked.ok, checked
            subprocess.run(["mount", "-o", "remount,size=256m", place], check=True)
            rest = run()
            after = verify(place / "store")
            assert after.ok, after
            assert after.samples == len(made)
            assert rest == len(made) - checked.samples
            print(f"disk filled after {checked.samples} of {len(made)} samples: {message}")
            print(f"  with space again, the next run extracted the other {rest}; all {after.samples} are right")
        finally:
            subprocess.run(["umount", place], check=True)


def two_at_once(url: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / name for name in ("one", "two")]
        command = [sys.executable, "-m", "tests.store.kill_rounds", "--victim", url]
        runs = [subprocess.Popen([*command, str(log)], stdout=subprocess.DEVNULL) for log in logs]
        codes = [run.wait() for run in runs]
        extracted = [len(log.read_text().split()) for log in logs]
    checked = verify(url)
    assert codes == [0, 0], codes
    assert checked.ok, checked
    print(
        f"two runs at once on {url.split('/')[0] or 'a local disk'}, the second waiting: extracted {extracted}, "
        f"{checked.samples} samples in the store, all right"
    )
    assert sum(extracted) == checked.samples == len(samples())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as local:
        two_at_once(f"{local}/two")
        full_disk()
        with s3_server(Path(local) / "server") as environment:
            os.environ.update(environment)
            two_at_once(f"s3://{BUCKET}/two")
            kill(f"s3://{BUCKET}/kill", args.rounds)
            kill(f"s3://{BUCKET}/kill-two", args.rounds, shares=2)
        kill(f"{local}/kill", args.rounds)
        kill(f"{local}/kill-two", args.rounds, shares=2)
