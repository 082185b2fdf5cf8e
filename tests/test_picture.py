"""The picture of a run shows what it was given, and stays bounded however many samples there are."""

import io

import numpy as np
from matplotlib.image import imread

from tasks.profile import profile_of
from tasks.report.picture import REMEMBERED, Profiles, data_uri, draw


def rms(num_tokens: int, peak: float = 1.0) -> np.ndarray:
    values = np.ones((num_tokens, 2)) + np.arange(num_tokens)[:, None] / 100
    values[0] *= peak
    return values


def test_a_profile_keeps_the_first_and_last_token_and_what_stands_out() -> None:
    profile = profile_of(rms(1000, peak=5000))
    assert (profile.positions[0], profile.positions[-1], len(profile.positions)) == (0, 999, 48)
    assert profile.peaks == (((0, 5000.0),), ((0, 5000.0),))
    assert profile_of(rms(1)).positions == (0,)
    assert profile_of(rms(30)).peaks == ((), ())


def test_it_is_drawn_with_outliers_and_without() -> None:
    plain, peaked = Profiles((3, 5)), Profiles((3, 5))
    for n in (1, 7, 300):
        plain.add_profile(profile_of(rms(n)))
        peaked.add_profile(profile_of(rms(n, peak=100)))
    pictures = [imread(io.BytesIO(draw(p, "run"))) for p in (plain, peaked)]
    red = [int(((p[..., 0] > 0.7) & (p[..., 1] < 0.4) & (p[..., 2] < 0.4)).sum()) for p in pictures]
    assert red[0] == 0
    assert red[1] > 20
    assert data_uri(b"x").startswith("data:image/png;base64,")


def test_of_many_samples_a_random_choice_is_kept() -> None:
    profiles = Profiles((3, 5))
    for n in range(1, 4 * REMEMBERED):
        profiles.add_profile(profile_of(rms(n)))
    assert profiles.seen == 4 * REMEMBERED - 1
    assert len(profiles.kept) == REMEMBERED
    lengths = sorted(p.positions[-1] for p in profiles.kept)
    assert lengths[0] < REMEMBERED
    assert lengths[-1] > 3 * REMEMBERED
