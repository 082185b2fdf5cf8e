"""How large states usually are, learned from the samples seen so far.

The measure of a sample is the median over its rows of their root mean square, so that massive activations (single
tokens thousands of times the rest) do not move it. A short sample has no rows but those near its beginning, which
are larger: each class of short lengths has a band of its own. The band is the median over samples times or divided
by a factor: six robust standard deviations (from the median absolute deviation) of the logarithm, at least 2.
"""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_SAMPLES = 16
"""Fewer samples of a length class make no band."""
REMEMBERED = 4096
LEAST_FACTOR = 2.0
DEVIATIONS = 6.0
LONG = 8
"""Samples of this many tokens and more are one class."""


@dataclass(frozen=True)
class Outside:
    """A sample whose states at one depth are larger or smaller than usual."""

    depth: int
    rms: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"r_{self.depth} has a median row RMS of {self.rms:.3g}, usual is {self.low:.3g} to {self.high:.3g}"


class Bands:
    """Bands of one run or one store; may be used from several threads."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = tuple(depths)
        self._seen: dict[int, deque[tuple[float, ...]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._lock = threading.Lock()

    def judge(self, samples: Mapping[str, tuple[int, tuple[float, ...]]]) -> dict[str, list[Outside]]:
        """Which samples stand out from those learned and from each other.

        Args:
            samples: key -> (tokens, median row RMS per depth).
        """
        by_class: dict[int, list[str]] = defaultdict(list)
        for key, (num_tokens, rms) in samples.items():
            if len(rms) == len(self._depths):
                by_class[_length_class(num_tokens)].append(key)
        found: dict[str, list[Outside]] = {}
        for length_class, keys in by_class.items():
            with self._lock:
                pool = [*self._seen[length_class], *(samples[key][1] for key in keys)]
            if len(pool) < MIN_SAMPLES:
                continue
            for d, depth in enumerate(self._depths):
                low, high = band(rms[d] for rms in pool)
                for key in keys:
                    value = samples[key][1][d]
                    if math.isfinite(value) and not low <= value <= high:
                        found.setdefault(key, []).append(Outside(depth, value, low, high))
        return found

    def learn(self, num_tokens: int, median_rms: tuple[float, ...]) -> None:
        """Take an accepted sample into account."""
        if len(median_rms) == len(self._depths):
            with self._lock:
                self._seen[_length_class(num_tokens)].append(median_rms)


def band(values: Iterable[float]) -> tuple[float, float]:
    """Bounds between which nearly all of the values should lie, whatever a minority of them is."""
    logs = np.array([math.log(v) for v in values if v > 0 and math.isfinite(v)])
    if not len(logs):
        return 0.0, math.inf
    center = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - center)))
    width = max(math.log(LEAST_FACTOR), DEVIATIONS * spread)
    return math.exp(center - width), math.exp(center + width)


def _length_class(num_tokens: int) -> int:
    return min(num_tokens.bit_length(), LONG.bit_length())
