"""Checks of shapes that the other tests rely on."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError
from shape_checks import calls, jaxtyped_where_shaped

from zdc_jax.cache.specs.spec import put_rows


def test_sizes_of_one_name_must_agree():
    def rows(kept):
        return put_rows(jnp.zeros((2, 3, 5, 4)), jnp.ones((2, 1, 3, 4)), jnp.zeros(2, int), kept)

    rows(jnp.ones((2, 1), bool))
    with pytest.raises(TypeCheckError):
        rows(jnp.ones((3, 1), bool))
    calls.clear()
    with pytest.raises(TypeCheckError):
        rows(jnp.ones((3, 1), bool))


def test_functions_without_shapes_are_left_alone():
    assert jaxtyped_where_shaped(typechecker=pytest.fail)(len) is len
