"""A plan is cut into shards that have every key once, and about equal work."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.plan.shards import Shard, cut
from tasks.vocabulary import PlannedSample


def sample(number: int, num_tokens: int) -> PlannedSample:
    return PlannedSample(hashlib.sha256(str(number).encode()).hexdigest(), num_tokens, (number,))


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 9))
def test_every_key_is_in_one_shard_and_the_work_is_even(lengths: list[int], count: int) -> None:
    samples = [sample(i, n) for i, n in enumerate(lengths)]
    shards = cut("fleet", samples, count)
    assert len(shards) <= min(count, len(samples))
    assert [(s.index, s.count) for s in shards] == [(i, len(shards)) for i in range(len(shards))]
    assert cut("fleet", samples[::-1], count) == shards, "the order of the data does not matter"
    for number in range(200):  # keys of the plan, and others
        if shards:
            assert sum(sample(number, 1).key in shard for shard in shards) == 1
    for shard in shards:
        tokens = sum(s.num_tokens for s in samples if s.key in shard)
        assert 0 < tokens <= sum(lengths) / count + max(lengths)


def test_nothing_to_do_needs_no_shard() -> None:
    assert cut("fleet", [], 4) == []


def test_a_shard_travels_as_plain_values() -> None:
    shard = cut("fleet", [sample(1, 5), sample(2, 5)], 2)[1]
    assert Shard.model_validate(shard.model_dump(mode="json")) == shard
    with pytest.raises(ValidationError):
        Shard(group="fleet", index=0, count=1, first="../")
