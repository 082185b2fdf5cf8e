"""Frames are what numcodecs' blosc decodes, whatever is in them."""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from tasks.store.blosc_frame import BLOCK_BYTES, compress


def frame_of(values: npt.NDArray[Any], *, shuffle: bool) -> bytes:
    return b"".join(compress(values, shuffle=shuffle))


def states(kind: str, count: int, seed: int = 0) -> npt.NDArray[np.generic]:
    values = np.random.default_rng(seed).standard_t(3, count).astype("<f4")
    return {"bfloat16": (values.view("<u4") >> 16).astype("<u2"), "float32": values, "fp8": values.view("u1")[:count]}[
        kind
    ]


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "fp8"])
@given(count=st.integers(1, 3000), same=st.booleans())
def test_any_number_of_elements_comes_back(kind: str, count: int, same: bool) -> None:
    values = states(kind, count)
    if same:
        values[:] = values[0]
    frame = frame_of(values, shuffle=kind != "fp8")
    assert blosc.decompress(frame) == values.tobytes()
    assert len(frame) <= 16 + values.nbytes


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("blocks", [1, 1.5, 3, 3.000002])
def test_several_blocks_and_the_rest(kind: str, blocks: float) -> None:
    values = states(kind, int(blocks * BLOCK_BYTES) // (1 if kind == "fp8" else 2))
    frame = frame_of(values, shuffle=kind != "fp8")
    there = np.empty_like(values)
    blosc.decompress(frame, there)
    assert there.tobytes() == values.tobytes()


def test_it_is_smaller_than_with_the_levels_that_blosc_knows() -> None:
    chunk = states("bfloat16", 256 * 7168).reshape(256, 7168)
    assert len(frame_of(chunk, shuffle=True)) < 0.995 * len(
        blosc.compress(chunk, b"zstd", 1, blosc.SHUFFLE, BLOCK_BYTES, 2)
    )


def test_equal_rows_and_padding_are_found() -> None:
    row = states("bfloat16", 7168)
    one = len(frame_of(row, shuffle=True))
    assert len(frame_of(np.tile(row, 64), shuffle=True)) < 3 * one
    assert len(frame_of(np.full(256 * 7168, 0x7FC0, np.uint16), shuffle=True)) < 1000


def test_noise_is_kept_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, 2 * BLOCK_BYTES, np.uint16)
    frame = frame_of(noise, shuffle=True)
    assert len(frame) == 16 + noise.nbytes
    assert blosc.decompress(frame) == noise.tobytes()
    noise[BLOCK_BYTES // 2 :] = 7  # but for one block
    frame = frame_of(noise, shuffle=True)
    assert BLOCK_BYTES < len(frame) < BLOCK_BYTES + 1000
    assert blosc.decompress(frame) == noise.tobytes()


def test_threads_do_not_share_anything() -> None:
    arrays = [states("bfloat16", 500_000, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            if blosc.decompress(frame_of(arrays[number], shuffle=True)) != arrays[number].tobytes():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
