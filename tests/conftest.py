"""Shared fixtures: exact matrix products, tiny models, and the reference data where it is present."""

import errno
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import shape_checks
from hf_variants import write_tokenizer, write_variant

shape_checks.install()

from compiled_when_used import CompiledWhenUsed

from benchmarks.random_weights import random_params
from convert.calibration.calibrate import CalibrationOptions, calibrate, collect_moments
from convert.calibration.make_basis import make_basis
from convert.conversion import convert
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import CheckpointWriter
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.engine import runner
from zdc_jax.fold import prepared_layers
from zdc_jax.loading import LanguageModel
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

# The same commit runs the same examples, so that a failure is never a matter of luck.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")

# Most programs run once or twice, and compiling them is what takes time. XLA's newer emitters for the CPU set
# up a compiler for each fusion: without them compiling takes half. The flags are read when JAX first asks for
# its devices; processes that tests start inherit them.
QUICK = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)
if QUICK not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} {QUICK}"
jax.config.update("jax_default_matmul_precision", "highest")
ON_CPU = jax.default_backend() == "cpu"
jax.config.update("jax_disable_most_optimizations", ON_CPU)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(ON_CPU))  # Processes that tests start do the same.
# Collecting garbage walks over all that tracing leaves: a twentieth of the time where it is done as usual.
gc.set_threshold(200_000, 20, 100)

LLAMA = ModelConfig(
    family="llama",
    layers=LayerSpec(rope=RopeConfig(theta=10_000.0)).repeated(3),
    norm="rms",
    embed_dim=64,
    ffn_dim=96,
    vocab_size=97,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
    norm_eps=1e-6,
    activation="silu",
    dtype="float32",
    tie_embeddings=True,
    eos_ids=(2,),
)
OPT = replace(
    LLAMA,
    family="opt",
    num_kv_heads=4,
    activation="relu",
    layers=LayerSpec(mlp="plain").repeated(3),
    norm="layer",
    position_offset=2,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
CONFIGS = {"llama": LLAMA, "opt": OPT}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run `full` tests and every entry of a `matrix`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--all` runs, and begin with the tests that start processes: they take longest."""
    if not config.getoption("--all"):
        left_out = list_left_out(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: "parallel" not in item.path.parts)


ON_DEMAND = ("gpu", "multigpu", "aot", "slow")
"""Marks of tests that run only where `-m` names them, and then with all their parameters."""


def list_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return tests marked `full`, and of a `matrix` all but the entries it names, by default the first."""
    left_out: set[pytest.Item] = set()
    begun: set[str] = set()
    for item in items:
        if any(map(item.get_closest_marker, ON_DEMAND)):
            continue
        name, _, parameters = item.nodeid.partition("[")
        matrix = item.get_closest_marker("matrix")
        if item.get_closest_marker("full"):
            left_out.add(item)
        elif matrix is not None:
            named = parameters.removesuffix("]") in matrix.args if matrix.args else name not in begun
            if not named:
                left_out.add(item)
            begun.add(name)
    return left_out


MOST_MAPS = 20_000
"""Memory maps of a process that tests may leave. Each compiled program takes three or more, and Linux allows
65,530: past that a process ends without a word."""


@pytest.fixture(autouse=True, scope="session")
def programs_compiled_when_used() -> Iterator[None]:
    """Let engines start at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "compile_all", CompiledWhenUsed)
        yield


@pytest.fixture(autouse=True, scope="module")
def bounded_memory_maps() -> Iterator[None]:
    """Drop compiled programs once there are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def reference_data() -> Path | None:
    """Return the folder of reference models and text: `ZDC_TEST_DATA`, or a sibling `shared/data`."""
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("ZDC_TEST_DATA", default))
    return folder if folder.exists() else None


@pytest.fixture(autouse=True)
def first_calls_checked() -> None:
    """Check the first calls of each test."""
    shape_checks.calls.clear()


@pytest.fixture
def shapes_unchecked() -> Iterator[None]:
    """Switch shape checks off, for tests of our own refusals of wrong shapes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def optimised() -> Iterator[None]:
    """Compile with all optimizations, for tests that spend their time running programs."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", ON_CPU)


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace kernels by zeros: public functions check, pad and merge, and trace no kernel."""

    def zeros(types):
        return [jnp.zeros(x.shape, x.dtype) for x in types]

    def stub(body, out_type, **options):
        return lambda *operands: zeros(out_type)

    monkeypatch.setattr(plgpu, "kernel", stub)
    with jax.disable_jit():  # What is traced here is not kept for others.
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the reference data, or skip; fail instead if `ZDC_REQUIRE_DATA` is set."""
    folder = reference_data()
    if folder is None:
        refuse = pytest.fail if os.environ.get("ZDC_REQUIRE_DATA") else pytest.skip
        refuse("reference data absent: set ZDC_TEST_DATA to the folder that holds models/")
    return folder


class TinyModel:
    """A random model large enough in its weights for attention to matter, with its calibration."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.config = config
        key = jax.random.key(seed)
        params = random_params(config, key)

        def grow(x):
            return 8 * x if x.ndim > 1 else x + 0.1 * jax.random.normal(key, x.shape)

        self.layers = [jax.tree.map(grow, layer) for layer in params["layers"]]
        self.embeddings = params["embeddings"]
        self.dense = Transformer(config, CompressionPlan.full(config), self.embeddings, self.layers)

    def tokens(self, batch: int, length: int, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return rng.integers(3, self.config.vocab_size, (batch, length), dtype=np.int32)

    def write(self, output: Path) -> None:
        """Write the converted folder, with a tokenizer of words `w0`, `w1`, …"""
        with CheckpointWriter(output) as writer:
            writer.write_embeddings(self.embeddings)
            for index, layer in enumerate(self.layers):
                writer.write_layer(index, layer)
            write_tokenizer(writer.partial, self.config.vocab_size)
            writer.finish(self.config, {})

    def basis(self, **options: Any) -> Basis:
        moments = collect_moments(self.dense, self.tokens(4, 64, seed=1), fingerprint="tiny")
        weights = [np.asarray(layer["attention"]["o"]) for layer in self.layers]
        shiftable = [layer.window is None for layer in self.config.layers]
        return make_basis(moments, weights, **{"shiftable": shiftable} | options)

    def model(self, plan: CompressionPlan, basis: Basis | None = None) -> LanguageModel:
        layers = prepared_layers(iter(self.layers), self.config, plan, basis or self.basis(), jnp.float32)
        return LanguageModel(Transformer(self.config, plan, self.embeddings, layers), None, basis)


def calibrated_folder(folder: Path, context: int) -> Path:
    """Write a converted and calibrated model to model/ and text of its words to text/."""
    write_variant("llama-head-dim-80", folder / "hf")
    rng = np.random.default_rng(0)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(" ".join(f"w{i}" for i in rng.integers(3, 96, 4000)))
    convert(folder / "hf", folder / "model", progress=False)
    options = CalibrationOptions(tokens=1024, context=context, qk="balanced", vo="balanced")
    calibrate(folder / "model", [folder / "text"], options, progress=False)
    return folder


@pytest.fixture(scope="session", params=["llama", "opt"])
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    """Return a tiny model of each family."""
    return TinyModel(CONFIGS[request.param])


@pytest.fixture(scope="session")
def tiny_llama() -> TinyModel:
    """Return the tiny Llama: rotary, two query heads per KV head."""
    return TinyModel(LLAMA)


@pytest.fixture(scope="session")
def tiny_opt() -> TinyModel:
    """Return the tiny OPT: learned positions, biases."""
    return TinyModel(OPT)


@pytest.fixture
def full_disk(monkeypatch):
    """Write only the first half of each text, as a full disk does."""

    def write_half(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_half)


@pytest.fixture
def on_kernels(monkeypatch):
    """Choose kernels as on a GPU that has them, to lower or compile them here."""
    for name, module in list(sys.modules.items()):
        if name.startswith("zdc_jax") and hasattr(module, "device_refusal"):
            monkeypatch.setattr(module, "device_refusal", lambda q: None)
