"""What a person sees while a run is going: samples, tokens, tokens/s and time left."""

import sys
import threading
from collections.abc import Sequence
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tasks.report.log import logger
from tasks.vocabulary import Chunk

LOG_SECONDS = 10.0  # without a terminal, a line this often takes the bar's place


class Progress:
    """Counts extracted samples and tokens; a bar on a terminal, log lines elsewhere. Safe from any thread."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        num_samples = sum(len(chunk.missing) for chunk in chunks)
        num_tokens = sum(sample.num_tokens for chunk in chunks for sample in chunk.missing)
        self.tokens = 0
        self._computed: set[str] = set()
        self._num_samples, self._num_tokens = num_samples, num_tokens
        self._lock = threading.Lock()
        self._began = self._logged = monotonic()
        self._first: float | None = None
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("extracting"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples · {task.fields[tokens]:,} tokens · {task.fields[rate]:,.0f} tokens/s ·"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not sys.stderr.isatty() or not num_samples,
        )
        self._task = self._bar.add_task("extract", total=num_samples, tokens=0, rate=0.0)

    @property
    def samples(self) -> int:
        """Samples computed so far."""
        return len(self._computed)

    @property
    def percent(self) -> float:
        """Share of the missing tokens that were computed; 100 where none are missing."""
        return 100.0 * self.tokens / self._num_tokens if self._num_tokens else 100.0

    def line(self) -> str:
        """How far it is, in one line."""
        rate = self.tokens_per_second
        left = (self._num_tokens - self.tokens) / rate if rate else 0.0
        return (
            f"{self.samples}/{self._num_samples} samples, {self.tokens:,}/{self._num_tokens:,} tokens, "
            f"{rate:,.0f} tokens/s, {left:,.0f} s left"
        )

    @property
    def tokens_per_second(self) -> float:
        """Since the engine was ready."""
        elapsed = monotonic() - (self._first or self._began)
        return self.tokens / elapsed if self.tokens else 0.0

    def engine_ready(self) -> None:
        """The engine is loaded: rates count from here."""
        with self._lock:
            self._first = self._first or monotonic()

    def advance(self, key: str, num_tokens: int) -> None:
        """One more sample was computed; one that is computed again, since its chunk is, counts once."""
        with self._lock:
            if key in self._computed:
                return
            self._computed.add(key)
            self.tokens += num_tokens
            self._bar.update(self._task, advance=1, tokens=self.tokens, rate=self.tokens_per_second)
            if self._bar.disable and monotonic() - self._logged >= LOG_SECONDS:
                self._logged = monotonic()
                logger.info(self.line())

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
