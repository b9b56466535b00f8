"""The adapter for lm-eval on a machine without lm-eval."""

import runpy
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "error", "prefix"),
    [("__main__", SystemExit, "error: "), ("harness", ModuleNotFoundError, "")],
)
def test_the_error_says_what_to_install(monkeypatch, name, error, prefix):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "zdc_jax.evaluation.harness", raising=False)
    with pytest.raises(error) as caught:
        runpy.run_module("zdc_jax.evaluation.harness", run_name=name)
    assert str(caught.value).startswith(f"{prefix}zdc_jax.evaluation.harness needs lm_eval")
    assert str(caught.value).endswith("; run: pip install 'zdc-jax[eval]'")
