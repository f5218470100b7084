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
