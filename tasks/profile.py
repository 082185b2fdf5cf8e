"""How large a sample's states are along its tokens: the same figures from an engine's rank and from disk."""

import numpy as np
import numpy.typing as npt

from tasks.vocabulary import Profile

POSITIONS = 48
PEAKS = 4
PEAK_FACTOR = 8.0
"""A row this many times the median row stands out."""


def profile_of(rms_TL: npt.NDArray[np.float64]) -> Profile:
    """Profile of a sample with these root mean squares of its rows."""
    num_tokens = rms_TL.shape[0]
    positions = np.unique(np.linspace(0, num_tokens - 1, min(num_tokens, POSITIONS)).astype(int))
    limits = PEAK_FACTOR * np.median(rms_TL, axis=0)
    peaks: list[tuple[tuple[int, float], ...]] = []
    for rms_T, limit in zip(rms_TL.T, limits, strict=True):
        largest = np.argsort(rms_T)[::-1][:PEAKS] if rms_T.max() > limit else ()
        peaks.append(tuple((int(t), float(rms_T[t])) for t in largest if rms_T[t] > limit))
    return Profile(
        positions=tuple(int(t) for t in positions),
        rms=tuple(tuple(float(x) for x in rms_TL[positions, d]) for d in range(rms_TL.shape[1])),
        peaks=tuple(peaks),
    )
