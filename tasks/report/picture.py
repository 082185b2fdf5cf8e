"""The picture of a run: how large the states are along the tokens, per depth, with outliers marked."""

import base64
import io
import random
import threading
from collections.abc import Sequence

from tasks.vocabulary import Profile, Receipt

REMEMBERED = 512
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
    from matplotlib.figure import Figure

    depths = profiles.depths
    columns = min(len(depths), 4)
    lines = -(-len(depths) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True).ravel()
    for d, (panel, depth) in enumerate(zip(panels, depths, strict=False)):
        peaks = 0
        for profile in profiles.kept:
            positions = [position + 1 for position in profile.positions]
            panel.plot(positions, profile.rms[d], color="tab:blue", alpha=0.25, linewidth=0.6)
            if profile.peaks[d]:
                peaks += len(profile.peaks[d])
                panel.plot(
                    [position + 1 for position, _ in profile.peaks[d]],
                    [rms for _, rms in profile.peaks[d]],
                    linestyle="",
                    marker="x",
                    markersize=4,
                    color="tab:red",
                )
        panel.set(title=f"r_{depth}, {peaks} outliers", xscale="log", yscale="log")
        panel.set_xlabel("token position, from 1")
        panel.set_ylabel("row RMS")
    for panel in panels[len(depths) :]:
        panel.set_visible(False)
    figure.suptitle(f"{title}: row RMS of {len(profiles.kept)} of {profiles.seen} samples; x: 8 times the median row")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def data_uri(png: bytes) -> str:
    """The picture as an address that needs no server."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
