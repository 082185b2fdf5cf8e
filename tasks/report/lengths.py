"""A picture of how long the samples are."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

BINS = 48


def draw_lengths(num_tokens: npt.NDArray[np.integer], path: Path, max_tokens: int | None = None) -> None:
    """Draw the histogram of sample lengths, by samples and by tokens, as PNG.

    Args:
        num_tokens: [samples], their lengths in tokens.
        path: where the picture goes.
        max_tokens: the length at which samples are cut, marked if given.
    """
    figure = Figure(figsize=(7, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    if len(num_tokens):
        low, high = int(num_tokens.min()), int(num_tokens.max())
        bins = np.unique(np.geomspace(low, high + 1, BINS).astype(np.int64))
        samples, _ = np.histogram(num_tokens, bins)
        tokens, _ = np.histogram(num_tokens, bins, weights=num_tokens)
        bars = axes.bar(bins[:-1], samples, np.diff(bins), align="edge", color="#8fb7de", label="samples")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        share = axes.twinx()
        line = share.stairs(tokens / tokens.sum() * 100, bins, color="#c0504d", label="tokens", baseline=None)
        share.set_ylabel("% of all tokens")
        share.set_ylim(bottom=0)
        axes.legend(handles=[bars, line], loc="upper left", frameon=False)
        if max_tokens is not None:
            axes.axvline(max_tokens, color="#555555", linestyle="--", linewidth=1)
    axes.set_xlabel("tokens a sample")
    axes.set_ylabel("samples")
    axes.set_title(f"{len(num_tokens):,} samples, {int(num_tokens.sum()):,} tokens")
    figure.savefig(path)
