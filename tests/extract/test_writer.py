"""What a writer does with samples that count on each other."""

from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract.assemble import Sample
from tasks.extract.row_facts import RowFacts
from tasks.extract.staged_rows import StagedFiles, StagedPrefixes, StagedRows
from tasks.extract.writer import Writer
from tasks.prefixes import prefix_names
from tasks.vocabulary import Receipt, SharedChunk, Sharing

L, H, C = 2, 4, 6
IDS = list(range(3 * C))


def stage(
    directory: Path,
    key: str,
    spec: Mapping[str, Any],
    states_LTH: npt.NDArray[Any],
    ids_T: npt.NDArray[np.int32],
    threads: Executor,
) -> Mapping[str, tuple[int, int]]:
    """Stages whole chunks of all depths, by their first row."""
    sharing: Sharing = spec["sharing"]
    bounds = [(start, start + C) for start in range(0, len(ids_T) - C + 1, C)]
    own = [chunk for chunk in bounds if chunk not in sharing.elsewhere]
    sharing.chunks |= {str(start): SharedChunk(f"{key} {start}", start, stop, L) for start, stop in own}
    return dict.fromkeys([*sharing.chunks, *sharing.linked()], (1, 1))


def sample(key: str, num_tokens: int, staged: list[StagedRows], promised: list[StagedRows]) -> Sample:
    states_LTB = np.zeros((L, num_tokens, 4 * H), np.uint8)
    return Sample(
        key=key,
        num_tokens=num_tokens,
        hidden_size=H,
        directory=Path(),
        keeps=True,
        dtype=torch.float32,
        bytes_LTB=states_LTB,
        buffer=states_LTB,
        facts=RowFacts.unknown(num_tokens, L),
        prefix=prefix_names(IDS[:num_tokens], C),
        shared=num_tokens,
        filled=num_tokens,
        staged=staged,
        promised=promised,
    )


def test_a_sample_keeps_its_promises_before_it_waits_for_those_of_others() -> None:
    """Else samples with ever longer prefixes, of which each counts on the one before, are staged one by one."""
    prefixes = StagedPrefixes(C, limit=10)
    receipts: SimpleQueue[Receipt] = SimpleQueue()
    writer = Writer(
        rank=0,
        world_size=1,
        dtype="float32",
        stage=f"{__name__}:stage",
        stage_spec={},
        threads=2,
        limit_bytes=1 << 20,
        on_receipt=lambda receipt, _: receipts.put(receipt),
        staged=prefixes,
    )
    digests = np.zeros((C, L), np.int64)
    first, second = (StagedRows(start, start + C, digests.tobytes()) for start in (0, C))
    writer.submit(sample("b", 2 * C, [first], [second]))
    writer.submit(sample("c", 3 * C, [second], []))
    assert receipts.get(timeout=10).key == "c"
    assert receipts.empty()
    first.settle(StagedFiles(digests + 7, {"0": SharedChunk("a 0", 0, C, L)}))
    of_b = receipts.get(timeout=10)
    assert (of_b.key, of_b.error, set(of_b.objects or ())) == ("b", None, {"0", str(C)})
    assert of_b.changed_rows == (C, C), "what arrived of the rows that others staged is part of its verification"
    writer.close()
