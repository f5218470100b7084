"""Ratios by age, against numbers worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner.staleness import make_ratios_by_age
from jaxrl_llm.types import TokenBatch


def test_ratios_by_age():
    ratios = np.array([[1, 2, 0.5, 1], [1, 4, 1, 9]])
    mask = np.array([[0, 1, 1, 1], [0, 1, 1, 0]], bool)
    batch = TokenBatch.from_rows(
        jnp.ones((2, 4), jnp.int32),
        mask,
        logprob_behavior=jnp.zeros((2, 4)),
        version=jnp.array([[-1, 5, 5, 4], [-1, 2, 1, 5]]),
        learner_version=5,
        logprob_proximal=jnp.log(jnp.asarray(ratios)),
    )
    found = make_ratios_by_age(3)(batch)()
    assert found == pytest.approx(
        {
            "staleness/ratio_mean_age_0": 1.25,  # 2 and 0.5
            "staleness/ratio_max_age_0": 2.0,
            "staleness/ess_age_0": 2.5**2 / (2 * 4.25),
            "staleness/ratio_mean_age_1": 1.0,
            "staleness/ratio_max_age_1": 1.0,
            "staleness/ess_age_1": 1.0,
            "staleness/ratio_mean_age_3": 2.5,  # 4 of age 3 and 1 of age 4
            "staleness/ratio_max_age_3": 4.0,
            "staleness/ess_age_3": 25 / (2 * 17),
        },
        rel=1e-6,
    )
