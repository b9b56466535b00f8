"""One process of `test_processes`: output of `zdc generate`, a stream, last hidden states, a benchmark."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.mesh import bench_sequence_parallel
from benchmarks.mesh.rivals.partition import Partition
from benchmarks.mesh.rivals.runahead_mesh import MeshRunahead
from convert.cli.main import main
from zdc_jax import MeshConfig, load, stream

folder, address, process_id = sys.argv[1:]
jax.config.update("jax_default_matmul_precision", "highest")
arguments = ["generate", f"{folder}/model", "w5 w6 w7 w8 w9 w10", "w3", "--mesh", "data=1,sequence=4"]
arguments += ["--coordinator", address, "--num-processes", "2", "--process-id", process_id]
assert main([*arguments, "--join-timeout", "60", "--max-new-tokens", "9"]) == 0
model, gathered = (
    load(f"{folder}/model", mesh=MeshConfig(sequence=4), weights=weights)
    for weights in ("replicated", "gathered")
)
# There are four chunks, and each is requested while the one before is computed.
deltas = list(stream(model, [[5, 6, 7], [9]], 20, stop_tokens=()))
np.save(
    f"{folder}/streamed-{process_id}.npy",
    [sum((d.tokens for d in deltas if d.sequence == r), ()) for r in (0, 1)],
)
tokens = jnp.asarray(np.random.default_rng(0).integers(3, 90, (1, 61), dtype=np.int32))
end = jnp.array([61])
last, _ = gathered.network.prefill(tokens, end, capacity=64)
pieces, cache = MeshRunahead(model.network).prefill(
    tokens, end, partition=Partition((20, 13, 9, 19)), capacity=64
)
decoded, _ = model.network.extend(cache, tokens[:, :1], end + 1)
np.save(f"{folder}/last-{process_id}.npy", np.stack([last, pieces, decoded[:, 0]]))
arguments = "--tasks dense:parts runahead --shape tiny --lengths 61 --window 9 --sinks 0 --far 16 16"
arguments += f" --repeats 1 --link-bytes 4096 --label gloo --results {folder}"
assert bench_sequence_parallel.main(arguments.split()) == 0
