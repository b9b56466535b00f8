"""Mesh configs and their refusals; one device suffices."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from zdc_jax.errors import MeshError
from zdc_jax.parallel.mesh import MeshConfig, layout


def test_parse():
    assert MeshConfig.parse("data=1,sequence=4,model=2") == MeshConfig(1, 4, 2)
    assert MeshConfig.parse(" sequence = 4 ") == MeshConfig(sequence=4)


@pytest.mark.parametrize(
    "text",
    ["", "sequence", "sequence=", "sequence=-1", "sequence=two", "tensor=2", "data=1,data=2", "data=1,"],
)
def test_parse_refuses(text):
    with pytest.raises(MeshError, match=r"AXIS=SIZE.*'data', 'sequence', 'model'"):
        MeshConfig.parse(text)


def test_sizes_are_positive():
    with pytest.raises(MeshError, match=r"mesh='sequence=0': 'sequence=0' is not AXIS=SIZE.*sizes from 1"):
        MeshConfig.parse("sequence=0")
    with pytest.raises(MeshError, match=r"sequence=1\.5: must be a number of devices"):
        MeshConfig(sequence=1.5)


def test_more_devices_than_there_are():
    count = jax.device_count()
    with pytest.raises(MeshError, match=rf"needs {2 * count} devices, there are {count}"):
        MeshConfig(data=2, sequence=count).create()


def test_axes_of_arrays():
    assert layout("B T D") == P(("data",), ("sequence",), None)
    assert layout("B K S R") == P(("data",), ("model", "sequence"), None, None)
    assert layout("B 1 D") == P(("data",), None, None)
