"""Mutated input: random damage to files that users may receive, and the runs that users would make.

`python tests/mutations.py --cases 10000` mutates Hugging Face folders, GGUF files, plans and converted
folders, then converts, loads and generates. Each case must end well or in a `ZDCError` that names what is
wrong, within `TIME_LIMIT`. No half-written file may remain, and a damaged converted folder must not load as
another model. A case follows from its seed alone; `--first SEED --cases 1` repeats one.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
from damage import mutate_gguf, mutated_bytes, mutated_json
from flax import nnx
from gguf_files import write_variant_gguf
from hf_variants import VARIANTS, weights, write_sharded, write_variant
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from convert.conversion import convert
from convert.hf.weights import INDEX, SINGLE
from zdc_jax import generate
from zdc_jax.basis import Basis
from zdc_jax.checkpoint import MANIFEST, Checkpoint
from zdc_jax.errors import ZDCError
from zdc_jax.loading import LanguageModel, load
from zdc_jax.methods import token_classes
from zdc_jax.plan import CompressionPlan

TIME_LIMIT = 20
"""Most seconds of processor time per case; on a busy machine, `WAIT` times as many may pass."""
WAIT = 6
PROCESSES = 2
REPORT = 500
"""Number of cases between two tables."""
SOURCES = (
    *("llama-gqa", "llama3-new", "llama-head-dim-80", "opt", "opt-350m-like", "llama-dynamic", "llama-yarn"),
    *("mistral", "qwen2-sliding", "qwen3-sliding", "gemma3", "gemma3-old", "phi3", "phi3-long", "phi3-old"),
)
GGUF_SOURCES = ("llama3-new", "llama-tied", "qwen3", "gemma3", "phi3-long")
CONVERTED = ("llama-head-dim-80", "opt", "gemma3")
SHARDED = "sharded"
GGUF = "model.gguf"


# --- Damage ----------------------------------------------------------------------------------------------


def mutate_json_file(path: Path, rng: np.random.Generator) -> None:
    """Damage a file of JSON as a value, as text, or by endless nesting."""
    choice = rng.random()
    if choice < 0.8:
        path.write_text(json.dumps(mutated_json(json.loads(path.read_text()), rng)))
    elif choice < 0.97:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
    else:
        depth, opening = int(10 ** rng.uniform(2, 5)), ("[", '{"a":')[rng.integers(2)]
        closing = {"[": "]", '{"a":': "}"}[opening]
        path.write_text(path.read_text().rstrip()[:-1] + f', "deep": {opening * depth}1{closing * depth}}}')


def mutate_safetensors(path: Path, rng: np.random.Generator) -> None:
    """Damage header, data or both of one safetensors file, or give it other tensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    choice = rng.random()
    if choice < 0.4:
        text = json.dumps(mutated_json(header, rng)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    elif choice < 0.6:
        path.write_bytes(mutated_bytes(data[: 8 + length], rng) + body)
    elif choice < 0.7:
        path.write_bytes(mutated_bytes(data, rng))
    else:
        tensors = load_file(path)
        key = sorted(tensors)[rng.integers(len(tensors))]
        value = tensors.pop(key)
        changes: tuple[Callable[[], Any], ...] = (
            lambda: value.T.copy(),
            lambda: value[:-1],
            lambda: value[None],
            lambda: np.full_like(value, [np.nan, np.inf, 1e38][rng.integers(3)]),
            lambda: value.astype([np.float16, np.float64, np.int32, bool][rng.integers(4)]),
            lambda: value.reshape(-1)[:0],
        )
        if (change := rng.integers(len(changes) + 1)) < len(changes):
            tensors[key] = changes[change]()
        path.unlink()
        save_file(tensors, path)


def mutate_folder(folder: Path, rng: np.random.Generator) -> None:
    """Damage, delete, add or swap files or folders of a converted folder; its calibration stays."""
    below = [path for path in sorted(folder.rglob("*")) if "calibration" not in path.parts]
    files = [path for path in below if path.is_file()]
    # Damage hits large files as often as their many small companions.
    sizes = np.sqrt([path.stat().st_size for path in files])
    path = files[rng.choice(len(files), p=sizes / sizes.sum())]
    other = below[rng.integers(len(below))]
    match rng.integers(10):
        case 0:
            path.unlink()
        case 1:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
        case 2:
            within = other if other.is_dir() else other.parent
            (within / f"{rng.integers(1000):03d}").write_bytes(rng.bytes(50))
        case 3:
            swap(path, files[rng.integers(len(files))])
        case 4:
            swap(folder / "layers/000", folder / ("layers/001", "embeddings")[rng.integers(2)])
        case 5:
            mutate_json_file(folder / MANIFEST, rng)
        case 6:
            path.unlink()
            path.mkdir()
        case _:
            path.write_bytes(mutated_bytes(path.read_bytes(), rng))


def swap(one: Path, other: Path) -> None:
    """Exchange two paths."""
    if one != other:
        aside = one.with_name(".aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)


# --- What users do with damaged files --------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Write the undamaged sources, converted folders and plans."""
    for name in SOURCES:
        write_variant(name, folder / "hf" / name)
    write_variant("llama-gqa", folder / "hf" / SHARDED)
    (folder / "hf" / SHARDED / SINGLE).unlink()
    write_sharded(folder / "hf" / SHARDED, weights(VARIANTS["llama-gqa"]), 3)
    for name in SOURCES[1::2]:
        write_bpe(folder / "hf" / name)
    for source in (folder / "hf").iterdir():
        settings = {"eos_token_id": [2], "do_sample": True}
        (source / "generation_config.json").write_text(json.dumps(settings))
    for name in GGUF_SOURCES:
        (folder / "gguf" / name).mkdir(parents=True)
        write_variant_gguf(name, folder / "gguf" / name / GGUF)
    for name in CONVERTED:
        checkpoint = convert(folder / "hf" / name, folder / name, progress=False)
        config = checkpoint.config
        random_basis(checkpoint).save(checkpoint.calibration_path / "basis")
        full = min(16, config.head_dim) if config.head_dim > 16 else config.head_dim
        plan = CompressionPlan.uniform(config, qk=full, v=full, window=8, sinks=2)
        plan.for_model(checkpoint.fingerprint).save(folder / f"{name}.json")
        if any(layer.window for layer in config.layers):
            continue  # Token classes need all tokens.
        settings = token_classes.Settings(rest_qk=full, rest_v=full, block=32)
        classes = replace(CompressionPlan.full(config), method="token_classes", settings=settings)
        classes.for_model(checkpoint.fingerprint).save(folder / f"{name}-classes.json")


def write_bpe(folder: Path) -> None:
    """Write a tokenizer with something in each of its parts, of the smaller of the usual kinds."""
    letters = [f"w{i}" for i in range(80)] + list("w0123456789")
    vocab = {piece: i + 3 for i, piece in enumerate(dict.fromkeys([*letters[80:], *letters]))}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {k: i for k, i in vocab.items() if i < 96}
    merges = [(a, b) for a in vocab for b in vocab if a + b in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    split = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Punctuation()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(pad_id=2, pad_token="</s>")
    tokenizer.save(str(folder / "tokenizer.json"))


def random_basis(checkpoint: Checkpoint) -> Basis:
    """Return a basis of orthogonal maps of the right shapes."""
    config, rng = checkpoint.config, np.random.default_rng(0)
    L, K, H = config.num_layers, config.num_kv_heads, config.head_dim
    k_map, v_map = np.linalg.qr(rng.standard_normal((2, L, K, H, H)))[0]
    spectrum, error = np.ones((2, L, K, H)), np.broadcast_to(np.linspace(1, 0, H + 1), (2, L, K, H + 1))
    return Basis(
        *(k_map, v_map, "stacked", "stacked"), *spectrum, *error, *np.ones((2, L, K)), 64, 64,
        checkpoint.fingerprint,
    )  # fmt: skip


def signature(model: LanguageModel) -> tuple[Any, ...]:
    """Return all that determines a model's output, for comparison."""
    arrays = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model.network)))
    words = None if model.tokenizer is None else model.tokenizer.to_str()
    return model.config, model.plan, words, tuple(np.asarray(array).tobytes() for array in arrays)


@cache
def undamaged(folder: Path, plan: Path | None) -> tuple[Any, ...]:
    """Return the signature of an original."""
    return signature(load(folder, plan))


def use(model: LanguageModel) -> None:
    """Generate a few tokens from text and from ids."""
    generate(model, "w3 w5 w7 never met", max_new_tokens=2)
    generate(model, [3, 5, 7], max_new_tokens=2)


def run_source(
    mutate: Callable[[Path, np.random.Generator], None], kind: str = "hf", file: str = ""
) -> Callable[..., None]:
    """Return a case that damages a folder, converts and loads it, and in one of eight runs generates.

    file: name of the file to convert, instead of the folder.
    """

    def run(originals: Path, scratch: Path, rng: np.random.Generator) -> None:
        sources = sorted((originals / kind).iterdir())
        shutil.copytree(sources[rng.integers(len(sources))], scratch / kind)
        mutate(scratch / kind, rng)
        try:
            convert(scratch / kind / file, scratch / "output", progress=False).check()
        except ZDCError:
            assert names(scratch) == [kind], f"half-written: {names(scratch)}"
            raise
        assert names(scratch) == [kind, "output"], f"files left: {names(scratch)}"
        model = load(scratch / "output")
        if rng.random() < 1 / 8:
            use(model)

    return run


def run_plan(originals: Path, scratch: Path, rng: np.random.Generator) -> None:
    """Damage a plan and load a model with it; in one of eight runs, generate."""
    name = CONVERTED[rng.integers(len(CONVERTED))]
    path = scratch / "plan.json"
    plans = sorted(originals.glob(f"{name}*.json"))
    shutil.copy(plans[rng.integers(len(plans))], path)
    mutate_json_file(path, rng)
    damaged = path.read_bytes()
    try:
        CompressionPlan.load(path)
        model = load(originals / name, path)
        if rng.random() < 1 / 8:
            use(model)
    finally:
        assert names(scratch) == ["plan.json"], f"files left: {names(scratch)}"
        assert path.read_bytes() == damaged, "the plan was written to"


def run_folder(originals: Path, scratch: Path, rng: np.random.Generator) -> None:
    """Damage a converted folder; if it loads, it must be the original model."""
    name = CONVERTED[rng.integers(len(CONVERTED))]
    plan = (None, originals / f"{name}.json")[rng.integers(2)]
    shutil.copytree(originals / name, scratch / "model")
    mutate_folder(scratch / "model", rng)
    before = sorted((scratch / "model").rglob("*"))
    try:
        found = signature(load(scratch / "model", plan))
    finally:
        assert sorted((scratch / "model").rglob("*")) == before, "loading changed the folder"
    assert found == undamaged(originals / name, plan), "silent damage: another model was loaded"


def pick_weights(folder: Path, rng: np.random.Generator) -> None:
    """Damage the index or one file of weights."""
    shards = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists() and rng.random() < 0.5:
        mutate_json_file(folder / INDEX, rng)
    elif rng.random() < 0.05:
        shards[0].unlink()
    else:
        mutate_safetensors(shards[rng.integers(len(shards))], rng)


def pick_config(folder: Path, rng: np.random.Generator) -> None:
    """Damage config.json, rarely generation_config.json."""
    mutate_json_file(folder / ("config.json", "generation_config.json")[int(rng.random() < 0.1)], rng)


KINDS: dict[str, Callable[[Path, Path, np.random.Generator], None]] = {
    "config": run_source(pick_config),
    "weights": run_source(pick_weights),
    "tokenizer": run_source(lambda folder, rng: mutate_json_file(folder / "tokenizer.json", rng)),
    "gguf": run_source(lambda folder, rng: mutate_gguf(folder / GGUF, rng), "gguf", GGUF),
    "plan": run_plan,
    "folder": run_folder,
}


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def run_case(originals: Path, seed: int) -> tuple[str, str]:
    """Run one case and return its kind and outcome: `loaded`, `refused`, or the failure."""
    kind = list(KINDS)[seed % len(KINDS)]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            KINDS[kind](originals, Path(scratch), np.random.default_rng(seed))
        except ZDCError:
            return kind, "refused"
        except KeyboardInterrupt:
            raise
        except BaseException:  # A panic of Rust is not an Exception.
            return kind, traceback.format_exc(limit=-4)
    return kind, "loaded"


# --- Many cases, in processes that may die ---------------------------------------------------------------


class Worker:
    """A process that runs one case at a time; it may die or hang, and is then replaced."""

    def __init__(self, originals: Path):
        self.originals = originals
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.originals), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()  # The process is ready; imports take longer than a case may.

    def give(self, seed: int) -> None:
        """Start a case."""
        self.seed, self.began = seed, time.monotonic()
        self.pipe.send(seed)

    def outcome(self) -> tuple[str, str] | None:
        """Return the kind and outcome of the case, or None while it runs."""
        kind = list(KINDS)[self.seed % len(KINDS)]
        if self.pipe.poll():
            try:
                return self.pipe.recv()
            except EOFError:
                self.process.join()
                late = self.process.exitcode == -signal.SIGPROF
                failure = f"more than {TIME_LIMIT} s" if late else f"process died, {self.process.exitcode=}"
        elif time.monotonic() - self.began > WAIT * TIME_LIMIT:
            self.process.kill()
            failure = f"no end after {WAIT * TIME_LIMIT} s"
        else:
            return None
        self._start()
        return kind, failure


def serve(pipe: Any, originals: Path) -> None:
    """Run the cases whose seeds come through the pipe."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Panics print to stderr.
    pipe.send("ready")
    while True:
        seed = pipe.recv()
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)  # The signal ends the process inside any library.
        outcome = run_case(originals, seed)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(outcome)


def run_many(originals: Path, seeds: range) -> Iterator[tuple[int, str, str]]:
    """Yield seed, kind and outcome of each case, as they end."""
    left, busy = iter(seeds), []
    for worker in (Worker(originals) for _ in range(PROCESSES)):
        if (seed := next(left, None)) is not None:
            worker.give(seed)
            busy.append(worker)
    while busy:
        wait([worker.pipe for worker in busy], timeout=1)
        for worker in tuple(busy):
            if (ended := worker.outcome()) is None:
                continue
            yield worker.seed, *ended
            if (seed := next(left, None)) is None:
                busy.remove(worker)
            else:
                worker.give(seed)


def main() -> int:
    """Print counts by kind, and the seed and error of each failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        seeds = range(options.first, options.first + options.cases)
        for seed, kind, outcome in run_many(Path(folder), seeds):
            failed = outcome not in ("loaded", "refused")
            counts[kind, "failed" if failed else outcome] += 1
            if failed:
                print(f"--- seed {seed}, {kind}:\n{outcome}", flush=True)
            if counts.total() % REPORT == 0 or counts.total() == options.cases:
                print(table(counts), flush=True)
    return int(any(end == "failed" for _, end in counts))


def table(counts: Counter[tuple[str, str]]) -> str:
    """Return a table of the cases so far by kind and outcome."""
    ends = ("loaded", "refused", "failed")
    rows = ["".join(f"{counts[kind, end]:8}" for end in ends) for kind in KINDS]
    lines = [f"{kind:10}{row}" for kind, row in zip(KINDS, rows, strict=True)]
    return "\n".join([f"{counts.total():<10}" + "".join(f"{end:>8}" for end in ends), *lines])


if __name__ == "__main__":
    sys.exit(main())
