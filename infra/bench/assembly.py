"""What assembly and writing take without an engine: made-up steps go into one assembly process, as from a GPU.

    python -m infra.bench.assembly --store /dev/shm
    python -m infra.bench.assembly --families 24 --members 40 --threads 12 --store /dev/shm      # on a host with GPUs

Samples come in families that share a prefix; with reuse, only the first of a family brings its rows. Both ways run in
turn. The states are noise, which is what a codec takes longest for. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infra.bench.processor_time import parent_and_seconds
from tasks.extract.assemble import RowSummary, summarize
from tasks.extract.assembly import AssemblySpec, CaptureSettings, Place, Wanted
from tasks.extract.assembly_process import AssemblyProcess
from tasks.extract.receipts import Inbox
from tasks.extract.step import Span
from tasks.prefixes import prefix_names
from tasks.store.layout import StateSpec
from tasks.store.stage import STAGE


class Rows(NamedTuple):
    """Rows as they come from a device: states [L, N, H], and what is known of them."""

    states_LNH: torch.Tensor
    summary: RowSummary


class Piece(NamedTuple):
    """A sample's rows of a step."""

    key: str
    start: int
    rows: Rows


def noise(args: argparse.Namespace, num_rows: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    states_LNH = torch.randn(args.depths, num_rows, args.hidden, generator=generator).to(torch.bfloat16)
    return Rows(states_LNH, summarize(tuple(states_LNH), torch.arange(num_rows) + seed * num_rows))


def steps(pieces: list[Piece], max_rows: int) -> Iterator[list[Piece]]:
    """Pieces that fit into a step together."""
    step: list[Piece] = []
    for piece in pieces:
        if step and sum(p.rows.states_LNH.shape[1] for p in [*step, piece]) > max_rows:
            yield step
            step = []
        step.append(piece)
    yield step


def run(args: argparse.Namespace, reuse: bool, prefixes: list[Rows], own: Rows) -> dict[str, Any]:
    """One way, in a process of its own."""
    root = Path(tempfile.mkdtemp(prefix="layertap-assembly-", dir=args.store))
    inbox = Inbox(1)
    stage_spec = StateSpec(args.depths, args.hidden, "bfloat16").to_dict() | {"links": str(root / "links")}
    settings = CaptureSettings(
        stage=STAGE,
        stage_spec=stage_spec,
        receipts=inbox.address,
        writer_threads=args.threads,
        staging_bytes=int(args.staging_gib * 2**30),
        ring_slots=3,
        deal=False,
        writer_process=True,
        reuse_bytes=int(args.reuse_gib * 2**30) if reuse else 0,
    )
    spec = AssemblySpec(0, 1, args.depths, args.hidden, "bfloat16", witnessed=False, block=16, settings=settings)
    process = AssemblyProcess(spec, slots=3, max_rows=args.rows)
    inbox.accept()
    wanted, pieces, shared = [], [], args.shared if reuse else 0
    for family, prefix in enumerate(prefixes):
        names = b"".join(prefix_names(prefix.summary.input_ids_N.numpy()[:shared], 16))
        for member in range(args.members):
            key = f"{family * args.members + member:064x}"
            wanted.append(Wanted(key, args.shared + args.own, str(root), 0, shared, names))
            if member == 0 or not reuse:
                pieces.append(Piece(key, 0, prefix))
            pieces.append(Piece(key, args.shared, own))
    _, before = parent_and_seconds(process.pid)
    try:
        seconds = _feed(process, inbox, wanted, list(steps(pieces, args.rows)))
        spent = parent_and_seconds(process.pid)[1] - before
        report = process.report()
        inbox.expect_end()
        process.close()
    finally:
        inbox.close()
        shutil.rmtree(root)
    tokens = len(wanted) * (args.shared + args.own)
    return {
        "tokens_per_s": round(tokens / seconds),
        "new_rows_per_s": round(sum(p.rows.states_LNH.shape[1] for p in pieces) / seconds),
        "waited_for_writers_s": round(report["waited_for_writers"], 2),
        "seconds": round(seconds, 2),
        "processor_seconds": round(spent, 2),
    }


def _feed(process: AssemblyProcess, inbox: Inbox, wanted: list[Wanted], made: list[list[Piece]]) -> float:
    """Seconds until every sample has its receipt."""
    began = time.perf_counter()
    process.expect(wanted)
    for step in made:
        slot, at = process.free_slot(), 0
        num_rows = sum(piece.rows.states_LNH.shape[1] for piece in step)
        states_LNH, summary = slot.views(num_rows, num_rows)
        places: list[Place] = []
        for piece in step:
            rows = slice(at, at + piece.rows.states_LNH.shape[1])
            states_LNH[:, rows] = piece.rows.states_LNH
            for there, here in zip(vars(summary).values(), vars(piece.rows.summary).values(), strict=True):
                there[rows] = here
            places.append((Span(f"{piece.key}-00000000", piece.start, rows), rows))
            at = rows.stop
        process.deliver(slot, places, num_rows, num_rows)
    while (found := inbox.take([sample.key for sample in wanted])) is None:
        time.sleep(0.005)
    errors = [receipt.error for ((receipt, _),) in found.values() if receipt.error or not receipt.objects]
    assert not errors, errors[:3]
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--depths", type=int, default=4)
    parser.add_argument("--shared", type=int, default=864, help="tokens that a family begins with")
    parser.add_argument("--own", type=int, default=400, help="tokens behind them")
    parser.add_argument("--families", type=int, default=3)
    parser.add_argument("--members", type=int, default=6, help="of a family")
    parser.add_argument("--rows", type=int, default=4096, help="of a step")
    parser.add_argument("--threads", type=int, default=2, help="that write")
    parser.add_argument("--staging-gib", type=float, default=2)
    parser.add_argument("--reuse-gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()

    prefixes = [noise(args, args.shared, family) for family in range(args.families)]
    own = noise(args, args.own, args.families)
    result: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    for turn in range(args.rounds):
        for reuse in (False, True) if turn % 2 == 0 else (True, False):
            found = run(args, reuse, prefixes, own)
            print(f"{'on' if reuse else 'off'}: {found}", flush=True)
            result.setdefault("on" if reuse else "off", []).append(found)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
