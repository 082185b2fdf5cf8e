"""Which rank writes which sample: even shares, and families together."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.extract.deal import Deal
from tasks.prefixes import prefix_names

BLOCK = 4


def names(*ids: int) -> bytes:
    return b"".join(prefix_names(ids, BLOCK))


def test_one_rank_writes_all() -> None:
    deal = Deal(1, block=BLOCK, lead=0)
    assert [deal.writer(n) for n in (5, 1, 9)] == [0, 0, 0]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 200))
def test_samples_that_share_nothing_are_dealt_evenly(lengths: list[int], writers: int, lead: int) -> None:
    deal = Deal(writers, block=BLOCK, lead=lead)
    given_to = [0] * writers
    for length in lengths:
        given_to[deal.writer(length)] += length
        assert max(given_to) - min(given_to) <= max(lengths)


def test_a_family_stays_with_one_rank_and_the_next_goes_to_another() -> None:
    deal = Deal(2, block=BLOCK, lead=100)
    first, second = names(*range(40)), names(*range(50, 90))
    assert [deal.writer(45, prefix) for prefix in (first, second, first, second, first, first)] == [0, 1, 0, 1, 0, 0]


def test_the_deepest_likeness_counts() -> None:
    deal = Deal(2, block=BLOCK, lead=100)
    both, of_one, of_two = [*range(8)], [*range(10, 18)], [*range(20, 28)]
    assert deal.writer(20, names(*both, *of_one)) == 0
    assert deal.writer(90, names(7)) == 1
    assert deal.writer(20, names(*both, *of_two)) == 0, "it begins like the first one"
    assert deal.writer(20, names(*both, *of_two)) == 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(2, 8), st.integers(0, 200))
def test_a_large_family_is_split_before_a_rank_is_too_far_ahead(families: list[int], writers: int, lead: int) -> None:
    deal = Deal(writers, block=BLOCK, lead=lead)
    prefixes = [names(*range(100 * family, 100 * family + 40)) for family in range(3)]
    given_to = [0] * writers
    for family in families:
        writer = deal.writer(50, prefixes[family])
        assert given_to[writer] <= min(given_to) + lead
        given_to = list(deal.given)
