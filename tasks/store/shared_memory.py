"""Shared memory for the states that DataLoader workers yield, used again and again.

Fresh shared memory costs about as much as decoding what goes into it: the worker pays a page fault for every 4 KiB,
and whoever lets go of it last gives every page back. A worker therefore keeps the blocks that it made. The main
process is handed a block's file descriptor, so nothing is copied, and the block is filled anew once no tensor in it is
left in either process.

What lies in a block is an ordinary tensor. It may be cut, kept, sent twice or cached by the worker: a block is not
filled anew while any of that is alive.
"""

import math
import os
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info

# A block begins with a flag for each holder of its present content: the worker itself, and each tensor sent.
_HEADER_BYTES = 4096
_HELD, _FREE, _ABANDONED = 0, 1, 2
# Free blocks that are kept, about as many as come back at the end of an epoch. There are more once the main process
# lets go of many batches at a time.
_SPARE = 4
# Token ids, masks and lengths travel by value: torch would make a file and a connection for each. They are in no block,
# since a trainer that keeps them would keep the states too.
_BY_VALUE_BYTES = 1 << 18
_BY_VALUE = {torch.bool, torch.int32, torch.int64}
# Blocks that the main process leaves mapped while it holds anything, the last ones it got: a block that comes back is
# then read without a page fault for every 64 KiB, half the cost of copying it elsewhere.
_MAPPED = 8


class _Block:
    """A piece of shared memory that this process made."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Of the content."""
        storage = torch.UntypedStorage._new_shared(_HEADER_BYTES + nbytes)  # type: ignore[no-untyped-call]
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        """Header and content."""
        self._bytes: npt.NDArray[np.uint8] = self.memory.numpy()
        self._holders = 0

    def fill(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 in it, to be written; it has to be free."""
        self._holders = 0
        content = self._bytes[_HEADER_BYTES : _HEADER_BYTES + nbytes]
        _hold(content, self._bytes, self.add_holder())
        return torch.from_numpy(content)  # whatever is made from this tensor keeps that very array

    def add_holder(self) -> int:
        """Number of a new holder of the content, this process itself being the first."""
        self._holders += 1
        self._bytes[self._holders - 1] = _HELD
        return self._holders - 1

    @property
    def can_be_sent(self) -> bool:
        return self._holders < _HEADER_BYTES

    @property
    def state(self) -> int:
        """_HELD: it is in use, here or elsewhere; _FREE; _ABANDONED: never to be filled again."""
        if self._holders and self._bytes[0] == _HELD:
            return _HELD
        # Only what this process holds can be sent, so from here on there are no new holders.
        flags = self._bytes[: self._holders]
        return _HELD if (flags == _HELD).any() else int(flags.max(initial=_FREE))

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the block's begin to the tensor; None where it lies elsewhere."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return offset if _HEADER_BYTES <= offset < _HEADER_BYTES + self.nbytes else None


_blocks: list[_Block] = []
_lock = threading.Lock()
_mapped: dict[int, torch.Tensor] = {}
_received: set[tuple[int, int]] = set()
_forks = 0


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with any content; in a DataLoader worker, in shared memory that is used again."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _plain(nbytes) if get_worker_info() is None else _take(nbytes)
    return memory.view(dtype).view(shape)


def _plain(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))  # numpy asks for huge pages, torch does not


def _take(nbytes: int) -> torch.Tensor:
    global _blocks
    with _lock:
        ForkingPickler.register(torch.Tensor, _reduce)
        states = [(block, block.state) for block in _blocks]
        free = sorted((block for block, state in states if state == _FREE), key=lambda block: block.nbytes)
        fitting = [block for block in free if block.nbytes >= nbytes]
        # Powers of two, so that there soon are blocks for all that comes. What is never written to takes no memory.
        block = fitting[0] if fitting else _Block(1 << max(nbytes - 1, 0).bit_length())
        spare = [other for other in free if other is not block][-_SPARE:]
        _blocks = [*(other for other, state in states if state == _HELD), *spare, block]
        return block.fill(nbytes)


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a worker pickles a tensor for another process."""
    if tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad:
        for block in _blocks:
            if (offset := block.offset(tensor)) is not None and block.can_be_sent:
                holder = block.add_holder()
                return _receive, (block.memory, holder, offset, tensor.dtype, tensor.shape, tensor.stride())
        is_shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
        if tensor.dtype in _BY_VALUE and tensor.nbytes <= _BY_VALUE_BYTES and not is_shared:
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)  # type: ignore[no-any-return, no-untyped-call]


def _receive(
    memory: torch.Tensor, holder: int, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    address = memory.data_ptr()
    _received.add((address, holder))
    # torch maps what is mapped already only once.
    _mapped.pop(address, None)
    _mapped[address] = memory
    for oldest in list(_mapped)[:-_MAPPED]:
        _mapped.pop(oldest, None)
    block: npt.NDArray[np.uint8] = memory.numpy()
    content = block[offset:]
    _hold(content, block, holder)
    storage = torch.from_numpy(content).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride)


def _hold(content: npt.NDArray[np.uint8], block: npt.NDArray[np.uint8], holder: int) -> None:
    """Hold the block until the array is gone."""
    weakref.finalize(content, _let_go, block, holder, os.getpid(), _forks).atexit = False


def _let_go(block: npt.NDArray[np.uint8], holder: int, process: int, forks: int) -> None:
    if os.getpid() == process:
        # A process that was forked in between has the tensor too, so what is in the block must stay.
        block[holder] = _FREE if forks == _forks else _ABANDONED
        _received.discard((block.ctypes.data, holder))
        if not _received:
            _mapped.clear()


def _before_fork() -> None:
    global _forks
    _forks += 1


def _in_child() -> None:
    global _blocks
    _blocks = []
    _mapped.clear()
    _received.clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
