"""Selection of the largest of many, compared with `jax.lax.top_k`."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zdc_jax.ops.selection import among_largest

numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, np.float32(-np.inf), np.float32(np.inf)]),
    st.floats(width=32, allow_nan=False, allow_subnormal=False),
)


@settings(max_examples=15, deadline=None)
@given(x=arrays(np.float32, (3, 17), elements=numbers), count=st.sampled_from([1, 5, 16, 17, 40]))
def test_are_those_of_top_k(x, count):
    # Inputs have ties and both zeros. Of equal numbers, the first are selected.
    indices = np.asarray(jax.lax.top_k(jnp.asarray(x) + 0.0, min(count, 17))[1])
    expected = np.zeros(x.shape, bool)
    np.put_along_axis(expected, indices, True, axis=-1)
    np.testing.assert_array_equal(among_largest(jnp.asarray(x), count), expected)
