"""Tables of measured configs: the kernels accept every entry, and each is the fastest of its times."""

import json

import jax
import numpy as np
import pytest

from kernels_pallas import DecodeConfig, PrefillConfig
from kernels_pallas.tuning import FOLDER, file_of, measured

TABLES = sorted(FOLDER.glob("*.json"))
CONFIGS = {"prefill": PrefillConfig, "decode": DecodeConfig}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_entries_are_the_fastest_of_what_was_timed(path):
    table = json.loads(path.read_text())
    assert path == file_of(table["device"])
    for kernel, make in CONFIGS.items():
        for entry in table[kernel]:
            make(**entry["config"])
            medians = {json.dumps(seen["config"]): np.median(seen["times"]) for seen in entry["ms"]}
            assert medians[json.dumps(entry["config"])] == min(medians.values())


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what holds without a GPU")
def test_without_the_device_nothing_was_measured():
    assert measured("prefill", R=64, Z=96, H=64, HV=96) is None
