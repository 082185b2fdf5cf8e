"""The picture of a run: how large the states are along the tokens, per depth, with outliers marked."""

import base64
import io
import random
import threading
from collections.abc import Sequence

import numpy as np

from tasks.vocabulary import Profile, Receipt

REMEMBERED = 256
"""Samples that are drawn; of more, a random choice."""


class Profiles:
    """Profiles of a run's samples; may be used from several threads."""

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = tuple(depths)
        self.seen = 0
        self.kept: list[Profile] = []
        self._random = random.Random(0)
        self._lock = threading.Lock()

    def add(self, receipts: Sequence[Receipt]) -> None:
        """Take an accepted sample's profile, which the rank that staged it has."""
        for receipt in receipts:
            if receipt.profile is not None:
                self.add_profile(receipt.profile)

    def add_profile(self, profile: Profile) -> None:
        with self._lock:
            self.seen += 1
            if len(self.kept) < REMEMBERED:
                self.kept.append(profile)
            elif (place := self._random.randrange(self.seen)) < REMEMBERED:
                self.kept[place] = profile


def draw(profiles: Profiles, title: str) -> bytes:
    """PNG with one panel a depth: row RMS over token position, single samples thin, rows that stand out as crosses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    depths = profiles.depths
    columns = min(len(depths), 4)
    lines = -(-len(depths) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True).ravel()
    for d, (panel, depth) in enumerate(zip(panels, depths, strict=False)):
        lines_P2 = [np.column_stack((np.add(profile.positions, 1), profile.rms[d])) for profile in profiles.kept]
        panel.add_collection(LineCollection(lines_P2, colors="tab:blue", alpha=0.25, linewidths=0.6))
        peaks = [(position + 1, rms) for profile in profiles.kept for position, rms in profile.peaks[d]]
        if peaks:
            panel.plot(*zip(*peaks, strict=True), linestyle="", marker="x", markersize=4, color="tab:red")
        panel.set(title=f"r_{depth}, {len(peaks)} outliers", xscale="log", yscale="log")
        panel.set_xlabel("token position, from 1")
        panel.set_ylabel("row RMS")
        panel.autoscale()
    for panel in panels[len(depths) :]:
        panel.set_visible(False)
    figure.suptitle(f"{title}: row RMS of {len(profiles.kept)} of {profiles.seen} samples; x: 8 times the median row")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def data_uri(png: bytes) -> str:
    """The picture as an address that needs no server."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
