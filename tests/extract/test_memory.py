"""Host memory: bounded, waiting only when waiting helps, and used again."""

import threading

import numpy as np

from tasks.extract.memory import HostMemory, fresh_memory


def test_a_buffer_is_used_again_for_a_sample_of_similar_length() -> None:
    memory = HostMemory(10_000)
    first = memory.take(1000)
    memory.give_back(first, written=False)
    assert memory.take(1050) is first
    assert memory.take(1050) is not first
    memory.give_back(first, written=False)
    assert memory.take(100) is not first, "a short sample does not hold a long one's memory"


def test_the_capture_waits_until_a_writer_gives_memory_back() -> None:
    memory = HostMemory(2500)
    held = [memory.take(1000), memory.take(1000)]
    memory.writing()
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(memory.take(1000).nbytes))
    waiting.start()
    waiting.join(timeout=0.2)
    assert waiting.is_alive()
    memory.give_back(held[0], written=True)
    waiting.join(timeout=10)
    assert len(taken) == 1
    assert memory.waited > 0


def test_it_never_waits_when_nothing_is_being_written() -> None:
    memory = HostMemory(1000)
    assert memory.take(5000).nbytes >= 5000
    assert memory.take(5000).nbytes >= 5000
    assert memory.waited == 0


def test_spare_memory_stays_within_the_limit() -> None:
    memory = HostMemory(4000)
    buffers = [memory.take(1000) for _ in range(6)]
    for buffer in buffers:
        memory.give_back(buffer, written=False)
    assert sum(b.nbytes for b in memory._spare) <= 4000


def test_fresh_memory_has_the_shape_that_was_asked_for() -> None:
    for shape in ((3, 5), (700, 4120), (0, 4)):
        memory = fresh_memory(*shape)
        assert (memory.shape, memory.dtype) == (shape, np.uint8)
        memory.fill(3)
        assert memory.sum() == 3 * memory.size
