"""The way of receipts from the ranks to the flow's process, beside the engine.

Asking the workers through the engine would empty its pipeline of steps each time: at the speed of prefill, a tenth of
its throughput. So each rank connects to a socket of the flow's process and sends what it has, when it has it.
"""

import contextlib
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.vocabulary import Receipt


class ReceiptsLost(RuntimeError):
    """A rank went away before the engine was told to end."""


class Inbox:
    """Collects receipts of all ranks; the flow's side."""

    def __init__(self, num_ranks: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="layertap-")  # only this user may enter it
        self.address = str(Path(self._directory.name) / "receipts")
        self._listener = Listener(self.address, "AF_UNIX", backlog=num_ranks)
        self._num_ranks = num_ranks
        self._received: dict[str, dict[int, tuple[Receipt, bytes]]] = {}
        self._settled: dict[int, set[int]] = {}
        self._lost: str | None = None
        self._closing = False
        self._connections: list[Connection[Any, Any]] = []

    def accept(self) -> None:
        """Wait for every rank; each has connected, or is about to."""
        for _ in range(self._num_ranks):
            connection = self._listener.accept()
            self._connections.append(connection)
            threading.Thread(target=self._read, args=(connection,), name="layertap-receipts", daemon=True).start()

    def take(self, keys: Sequence[str], question: int | None = None) -> dict[str, list[tuple[Receipt, bytes]]] | None:
        """Receipts by key and rank, with the digests of the sample's rows (int64 [T, L], little-endian).

        Args:
            keys: of the samples.
            question: number under which the ranks were asked to settle them, if they were.

        Returns:
            None while one is missing; what is given is forgotten here. Once every rank has settled the samples, what
            there is, however little.

        Raises:
            ReceiptsLost: a rank went away.
        """
        if self._lost is not None:
            raise ReceiptsLost(self._lost)
        settled = question is not None and len(self._settled.get(question, ())) == self._num_ranks
        if not settled and any(len(self._received.get(key, ())) < self._num_ranks for key in keys):
            return None
        return {key: [of_rank for _, of_rank in sorted(self._received.pop(key, {}).items())] for key in keys}

    def expect_end(self) -> None:
        """The ranks may go now."""
        self._closing = True

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()

    def _read(self, connection: "Connection[Any, Any]") -> None:
        rank: Any = "that is not known"
        try:
            rank = connection.recv()
            while True:
                match connection.recv():
                    case (Receipt() as receipt, bytes() as digests):
                        self._received.setdefault(receipt.key, {})[rank] = (receipt, digests)
                    case int() as question:
                        self._settled.setdefault(question, set()).add(rank)
        except (EOFError, OSError):
            if not self._closing:
                self._lost = f"rank {rank} ended"


class Outbox:
    """Sends receipts; a rank's side, from any thread."""

    def __init__(self, address: str, rank: int) -> None:
        self._connection = Client(address, "AF_UNIX")
        self._connection.send(rank)
        self._lock = threading.Lock()

    def receipt(self, receipt: Receipt, digests_TL: npt.NDArray[np.int64]) -> None:
        """Send the receipt of a sample, and the digests of its rows."""
        self._send((receipt, digests_TL.astype("<i8").tobytes()))

    def settled(self, question: int) -> None:
        """Say that no more receipts will come of the samples that were asked for under this number."""
        self._send(question)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError), self._lock:  # without the flow's process, the engine is about to end
            self._connection.send(message)

    def close(self) -> None:
        self._connection.close()
