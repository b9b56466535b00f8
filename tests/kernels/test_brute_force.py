"""Tolerances for kernels: rounding passes, and an error in one head of one row fails."""

import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import check, decode, prefill

B, T, N, K, S, H = 2, 40, 32, 8, 96, 64


@pytest.fixture(scope="module", params=["prefill", "decode"])
def case(request):
    """Return a reference of many heads: o [B, (T,) N, H] and log-sum-exp."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, s, H)) for n, s in ((T, N), (K, S), (K, S)))
    if request.param == "decode":
        return decode(q[:, 0], k, v, np.array([S, 30]), scale=0.1)
    return prefill(q, k, v, scale=0.1, starts=np.array([5, 50]), lengths=np.array([45, 80]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_rounding_loses_passes(case, dtype):
    o, lse = case
    check(jnp.asarray(o, dtype), jnp.asarray(lse, jnp.float32), o, lse, dtype)


def test_one_head_of_one_row_that_is_off_by_a_hundredth_fails(case):
    o, lse = case
    wrong = o.copy()
    wrong[1, ..., 3, :] *= 1.01
    with pytest.raises(AssertionError):
        check(wrong, lse, o, lse, jnp.bfloat16)


def test_a_log_sum_exp_that_is_off_fails(case):
    o, lse = case
    wrong = lse.copy()
    wrong[0, 3] += 1e-4
    with pytest.raises(AssertionError):
        check(o, wrong, o, lse, jnp.bfloat16)


def test_a_query_that_sees_nothing_must_give_zeros():
    o, lse = np.zeros((1, 2, 4)), np.full((1, 2), -np.inf)
    check(o, lse, o, lse, jnp.bfloat16)
    with pytest.raises(AssertionError):
        check(o + 1e-9, lse, o, lse, jnp.bfloat16)
