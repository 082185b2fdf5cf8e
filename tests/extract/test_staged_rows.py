"""Rows that are staged, or about to be: who may link to them, and what happens if nothing comes of it."""

import threading

import numpy as np
import pytest

from tasks.extract.staged_rows import StagedPrefixes, StagedRows, uncovered
from tasks.prefixes import prefix_names
from tasks.vocabulary import ChunkGone, SharedChunk

L, BLOCK, CHUNK = 2, 4, 6
IDS = np.arange(20)
NAMES = prefix_names(IDS, BLOCK)
DIGESTS = np.arange(20 * L, dtype=np.int64).reshape(20, L)


def chunks(*starts: int) -> dict[str, SharedChunk]:
    return {f"{d} {s}": SharedChunk(f"name {d} {s}", s, s + CHUNK, 1) for s in starts for d in range(L)}


def known(limit: int = 100) -> StagedPrefixes:
    """With one chunk of another prefix, so that the length of chunks is known."""
    staged = StagedPrefixes(BLOCK, limit)
    other = prefix_names(IDS + 100, BLOCK)
    staged.learn(other, [], chunks(0), DIGESTS, DIGESTS)
    return staged


def bounds(found: list[StagedRows]) -> list[tuple[int, int]]:
    return [(rows.start, rows.stop) for rows in found]


def test_what_is_promised_is_found_and_waited_for() -> None:
    staged = known()
    promised = staged.promise(NAMES, 20, DIGESTS)
    assert bounds(promised) == [(0, 6), (6, 12), (12, 18)]
    assert staged.promise(NAMES, 20, DIGESTS) == [], "another sample has promised them"
    found = staged.find(NAMES, 0, 16, DIGESTS)
    assert bounds(found) == [(0, 6), (6, 12)]
    seen: list[dict[str, SharedChunk]] = []
    waiting = threading.Thread(target=lambda: seen.extend(dict(rows.files().chunks) for rows in found))
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive()
    staged.learn(NAMES, promised, chunks(0, 6), DIGESTS, DIGESTS + 1)
    waiting.join(timeout=10)
    assert seen == [chunks(0), chunks(6)]
    assert np.array_equal(found[1].files().arrived_TL, DIGESTS[6:12] + 1)


def test_a_promise_that_is_not_kept_passes_to_the_next() -> None:
    staged = known()
    promised = staged.promise(NAMES, 12, DIGESTS)
    (first, _) = staged.find(NAMES, 0, 12, DIGESTS)
    staged.learn(NAMES, promised, chunks(6), DIGESTS, DIGESTS)
    for rows in promised:
        rows.settle(None)
    with pytest.raises(ChunkGone, match=r"rows \[0, 6\)"):
        first.files()
    assert bounds(staged.find(NAMES, 0, 12, DIGESTS)) == [(6, 12)], "what was staged stays"
    assert bounds(staged.promise(NAMES, 12, DIGESTS)) == [(0, 6)]


def test_nothing_is_promised_of_chunks_that_others_could_not_use() -> None:
    assert StagedPrefixes(BLOCK, 100).promise(NAMES, 20, DIGESTS) == [], "the length of chunks is not known"
    staged = known()
    assert staged.promise(NAMES[:1], 6, DIGESTS[:6]) == [], "a sample of one chunk is not cut"
    assert bounds(staged.promise(NAMES, 11, DIGESTS)) == [(0, 6)], "the second is not wholly shared"
    assert bounds(staged.promise(NAMES[:3], 20, DIGESTS)) == [(6, 12)], "the third ends in a block without a name"


def test_rows_with_other_bits_are_not_found() -> None:
    staged = known()
    staged.learn(NAMES, [], chunks(0), DIGESTS, DIGESTS)
    assert bounds(staged.find(NAMES, 0, 8, DIGESTS)) == [(0, 6)]
    other = DIGESTS.copy()
    other[5, 0] += 1
    assert staged.find(NAMES, 0, 8, other) == []


def test_the_least_recently_used_go_first() -> None:
    staged = known(limit=2)
    staged.learn(NAMES, [], chunks(0, 6), DIGESTS, DIGESTS)
    assert bounds(staged.find(NAMES, 0, 20, DIGESTS)) == [(0, 6), (6, 12)]
    staged.find(NAMES, 0, 6, DIGESTS)
    staged.learn(NAMES, [], chunks(12), DIGESTS, DIGESTS)
    assert bounds(staged.find(NAMES, 0, 20, DIGESTS)) == [(0, 6), (12, 18)]


def test_uncovered() -> None:
    rows = [StagedRows(start, stop, DIGESTS[start:stop].tobytes()) for start, stop in ((0, 6), (8, 10))]
    assert uncovered(rows, 0, 12) == [(6, 8), (10, 12)]
    assert uncovered([], 3, 5) == [(3, 5)]
    assert uncovered(rows[:1], 0, 6) == []
