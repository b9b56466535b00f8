"""A converted folder loaded straight onto a mesh: each device holds its share and nothing else."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import LLAMA, TinyModel, calibrated_folder

from zdc_jax import choose_plan, load
from zdc_jax.errors import MeshError
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.parallel.mesh import MeshConfig

CONFIG = replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("loading") / "model"
    TinyModel(CONFIG).write(output)
    return output


def test_each_device_holds_its_share(folder, monkeypatch):
    """Check that host arrays never pass through the default device, and that perplexity is equal."""
    whole = load(folder)
    put = jax.device_put

    def put_elsewhere(x, *where):
        return put(x, *where) if where else pytest.fail("an array on the default device")

    monkeypatch.setattr("jax.device_put", put_elsewhere)
    on_mesh = load(folder, mesh=MeshConfig(data=2, sequence=2, model=2)).network
    monkeypatch.undo()
    layer = whole.network.layers[0]
    for layers, shares, kv_heads in ((on_mesh.prompt_layers, 2, 1), (on_mesh.layers, 4, 1)):
        attention = layers[0].attention
        shapes = [x[...].addressable_shards[0].data.shape for x in (attention.q, attention.k, attention.o)]
        assert shapes == [(64, 8 // shares, 32), (64, kv_heads, 32), (8 // shares, 32, 64)]
        assert layers[0].mlp.up[...].addressable_shards[0].data.shape == (64, 96 // shares)
        np.testing.assert_array_equal(attention.q[...], layer.attention.q[...])
        copies = max(1, shares // 2)
        np.testing.assert_array_equal(attention.k[...], np.repeat(layer.attention.k[...], copies, axis=1))
    windows = np.random.default_rng(0).integers(3, 90, (2, 61), dtype=np.int32)
    expected = window_nll(whole.network, windows, batch=2)
    np.testing.assert_allclose(window_nll(on_mesh, windows, batch=2), expected, rtol=1e-5)


def test_weights_are_on_the_default_device_of_the_caller(folder):
    device = jax.devices()[3]
    with jax.default_device(device):
        network = load(folder).network
    leaves = jax.tree.leaves(network)
    assert {each for leaf in leaves for each in leaf.devices()} == {device}
    assert not any(leaf.committed for leaf in leaves)


def test_refusals(folder):
    with pytest.raises(MeshError, match="needs 16 devices, there are 8"):
        load(folder, mesh=MeshConfig(sequence=16))
    with pytest.raises(MeshError, match="num_heads=8: cannot be divided over model=1 times sequence=7"):
        load(folder, mesh="sequence=7")


@pytest.mark.full
def test_plans_are_checked_where_they_will_run(tmp_path, monkeypatch):
    """Check plans on the mesh and in float8."""
    folder, placed = calibrated_folder(tmp_path, 128), []
    monkeypatch.setattr("zdc_jax.planning.checked.CHECKS", 1)

    def measured(network, windows, batch):
        return placed.append(network) or np.full(len(windows), 0.1 * len(placed))

    monkeypatch.setattr("zdc_jax.planning.choose.window_nll", measured)
    asked = {"check_text": folder / "text", "mesh": MeshConfig(sequence=2), "payload": "float8"}
    with pytest.warns(UserWarning, match="the model is not compressed"):
        assert choose_plan(folder / "model", max_degradation=0.05, **asked) is None
    assert [network.payload for network in placed] == ["native", "float8"]
    found = choose_plan(folder / "model", max_degradation=0.99, **asked)
    assert found == placed[-1].plan
    assert load(folder / "model", found, mesh=asked["mesh"], payload="float8").network.payload == "float8"
