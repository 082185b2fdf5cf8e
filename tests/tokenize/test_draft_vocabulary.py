"""The draft model's vocabulary, from what is supervised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tokenize.draft_vocabulary import count_tokens, draft_vocabulary

SAMPLES = [
    (np.array([5, 5, 9, 2], np.int32), np.array([0, 1, 1, 1], bool)),
    (np.array([9, 9, 7], np.int32), np.array([1, 1, 0], bool)),
    (np.array([0], np.int32), np.array([0], bool)),
]


def test_only_supervised_tokens_are_counted() -> None:
    assert count_tokens(iter(SAMPLES), 10).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 3]
    assert count_tokens([], 4).tolist() == [0, 0, 0, 0]


def test_d2t_holds_offsets_and_t2d_says_which() -> None:
    vocabulary = draft_vocabulary(count_tokens(SAMPLES, 10), 3)
    assert vocabulary.target_ids.tolist() == [2, 5, 9]
    assert vocabulary.d2t.tolist() == [2, 4, 7]
    assert np.flatnonzero(vocabulary.t2d).tolist() == [2, 5, 9]
    assert (vocabulary.d2t.dtype, vocabulary.t2d.dtype, vocabulary.t2d.shape) == (np.int64, np.bool_, (10,))
    assert vocabulary.coverage == 1.0


def test_of_equally_frequent_tokens_the_lower_ids_are_taken() -> None:
    vocabulary = draft_vocabulary(count_tokens(SAMPLES, 10), 2)
    assert vocabulary.target_ids.tolist() == [2, 9]
    assert vocabulary.coverage == 4 / 5
    assert draft_vocabulary(count_tokens(SAMPLES, 10), 5).target_ids.tolist() == [0, 1, 2, 5, 9]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any), st.data())
def test_both_tables_name_the_same_tokens_and_no_left_out_token_is_more_frequent(
    counts: list[int], data: st.DataObject
) -> None:
    frequencies = np.array(counts)
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = draft_vocabulary(frequencies, size)
    assert vocabulary.target_ids.tolist() == np.flatnonzero(vocabulary.t2d).tolist()
    assert len(vocabulary.d2t) == size
    if size < len(counts):
        assert frequencies[vocabulary.t2d].min() >= frequencies[~vocabulary.t2d].max()
    assert vocabulary.coverage == pytest.approx(frequencies[vocabulary.t2d].sum() / frequencies.sum())


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(np.array([10]), np.array([True]))], "token ids from 10 to 10 in a vocabulary of 10"),
        ([(np.array([1, 2]), np.array([True]))], "a loss mask of 1 entries for 2 tokens"),
    ],
)
def test_what_cannot_be_counted_is_refused(samples: list[tuple[np.ndarray, np.ndarray]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_tokens(samples, 10)


@pytest.mark.parametrize(("counts", "size"), [([1, 2], 3), ([1, 2], 0), ([0, 0], 1)])
def test_what_cannot_be_chosen_is_refused(counts: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="draft vocabulary"):
        draft_vocabulary(np.array(counts), size)
