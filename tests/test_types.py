"""`TokenBatch.from_rows`: what it refuses."""

import numpy as np
import pytest

from jaxrl_llm.types import TokenBatch

TOKENS = np.ones((2, 3), np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": [1.0, np.nan]}, "temperature must be positive"),
        ({"temperature": 1e300}, "temperature must be positive and finite"),
        ({"lengths": [3, -1]}, "lengths must be in \\[0, 3\\]"),
        ({"lengths": [3, 9]}, "lengths must be in \\[0, 3\\]"),
        ({"group": [0.5, 1.5]}, "group must hold integers"),
        ({"segments": TOKENS}, "unknown field\\(s\\) segments"),
        ({"sekwence": TOKENS}, "unknown field\\(s\\) sekwence"),
        ({"mask": TOKENS[:1] == 1}, "mask must have the shape"),
    ],
)
def test_from_rows_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_rows(TOKENS, **{"mask": TOKENS == 1, **change})


def test_from_rows_takes_whole_numbers_as_groups():
    batch = TokenBatch.from_rows(TOKENS, TOKENS == 1, group=np.array([4.0, 4.0]), temperature=[0.5, 2.0])
    assert np.asarray(batch.group)[:, 0].tolist() == [4, 4]
    assert np.asarray(batch.temperature)[:, 0].tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    "support, message",
    [
        (np.ones((1, 3)), r"must be \[1, 3, K\]"),
        (np.full((1, 3, 2), 2.5), "must hold integers"),
        ([[[-1, -1], [1, 3], [2, 2]]], "name a token twice"),
        ([[[-1, -1], [3, -1], [2, -1]]], r"token \(0, 1\) is not among its support_ids"),
        ([[[-1, -1], [1, -1], [-2 - 2, -1]]], r"token \(0, 2\) is not among its support_ids"),
        ([[[-1, -1], [1, -1], [2, 2**30]]], "neither a token id nor a code"),
        ([[[-1, -1], [1, -1], [2, -(2**40)]]], "neither a token id nor a code"),
    ],
)
def test_from_rows_refuses_what_a_token_cannot_have_been_drawn_from(support, message):
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_rows(np.array([[0, 1, 2]]), np.ones((1, 3), bool), support_ids=np.asarray(support))


def test_from_rows_takes_supports():
    tokens, mask = np.array([[0, 1, 2]]), np.array([[False, True, False]])
    ids = np.array([[[9, 9], [1, -1], [-1, -1]]], np.int64)  # what was not sampled may say anything
    batch = TokenBatch.from_rows(tokens, mask, support_ids=ids)
    assert batch.support_ids.dtype == np.int32 and batch.support_ids.tolist() == ids.tolist()
    assert TokenBatch.from_rows(tokens, mask, support_ids=ids[..., :0]).support_ids is None
