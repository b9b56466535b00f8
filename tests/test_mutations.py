"""Sample of `mutations.py`: damaged input ends in a named error or does no harm."""

from pathlib import Path

import mutations
import numpy as np
import pytest


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the undamaged folders and plans."""
    folder = tmp_path_factory.mktemp("originals")
    mutations.prepare(folder)
    return folder


@pytest.mark.parametrize("kind", mutations.KINDS)
@pytest.mark.matrix("gguf")
def test_damage_is_refused_or_harmless(kind, originals, monkeypatch):
    monkeypatch.setattr(mutations, "use", lambda model: None)  # `use` compiles.
    first, step = list(mutations.KINDS).index(kind), len(mutations.KINDS)
    outcomes = {seed: mutations.run_case(originals, seed)[1] for seed in range(first, 30 * step, step)}
    assert {seed: end for seed, end in outcomes.items() if end not in ("loaded", "refused")} == {}
    assert "refused" in outcomes.values()


def test_another_model_is_taken_for_silent_damage(originals, monkeypatch):
    # This checks the harness: a load with other weights must fail, and so must an unnamed error.
    folder_seed = list(mutations.KINDS).index("folder")
    monkeypatch.setattr(mutations, "mutate_folder", lambda *_: None)
    assert mutations.run_case(originals, folder_seed) == ("folder", "loaded")
    monkeypatch.setattr(mutations, "undamaged", lambda *_: ())
    assert "silent damage" in mutations.run_case(originals, folder_seed)[1]
    monkeypatch.setattr(mutations, "load", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in mutations.run_case(originals, folder_seed)[1]


def test_mutations_change_what_they_are_given():
    rng, value = np.random.default_rng(0), {"a": [1, {"b": "text"}], "c": 2.5}
    changed = [repr(mutations.mutated_json(value, rng)) != repr(value) for _ in range(200)]
    assert value == {"a": [1, {"b": "text"}], "c": 2.5}
    assert sum(changed) > 150
    assert sum(mutations.mutated_bytes(b"0123456789", rng) != b"0123456789" for _ in range(200)) > 150
