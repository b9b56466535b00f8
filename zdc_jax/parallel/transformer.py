"""A transformer on whole sequences whose tokens are divided over a mesh."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from zdc_jax.axes import Array
from zdc_jax.errors import MeshError
from zdc_jax.model.block import Block
from zdc_jax.model.transformer import Embeddings, Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.parallel.attention import METHODS, Method, sharded_attention
from zdc_jax.parallel.mesh import DATA, SEQUENCE, spec
from zdc_jax.plan import LayerRanks


def hidden(
    network: Transformer,
    tokens: Int[Array, "B T"],
    mesh: Mesh,
    *,
    method: Method = "ulysses",
    implementation: Implementation | None = None,
) -> Float[Array, "B T' D"]:
    """`Transformer.hidden` on a mesh: batch over `data`, tokens over `sequence`; weights on every device.

    T need not be a multiple of the devices along `sequence`: prompts are padded on the right to T', where
    causal attention does not look. The result is divided as the tokens are; that of padding is unspecified.

    Args:
      method: how attention gets at tokens of other devices, see `zdc_jax.parallel.attention`.
      implementation: of attention on each device, see `zdc_jax.ops.attention`.

    Raises:
      MeshError: heads, batch or tokens cannot be divided over this mesh; before anything is computed.
      NotImplementedError: the plan has token classes, or the implementation cannot do a call.
    """
    B, T = tokens.shape
    check(network, mesh, B, T, method)
    tokens = jnp.pad(tokens, ((0, 0), (0, -T % mesh.shape[SEQUENCE])))
    plan = network.plan
    near = (plan.sinks, plan.window)
    x = _embed(network.embeddings, tokens, jnp.int32(T), mesh)
    for block, ranks in zip(network.layers, plan.layers, strict=True):
        x = _layer(block, x, ranks, near, mesh, method, implementation)
    return x


def check(network: Transformer, mesh: Mesh, batch: int, length: int, method: Method) -> None:
    """Raises what `hidden` says where this mesh cannot serve these prompts."""
    heads, U = network.config.num_heads, mesh.shape[SEQUENCE]
    if method not in METHODS:
        raise ValueError(f"{method=} must be one of {METHODS}")
    if network.plan.classes is not None:
        raise NotImplementedError("plans with token classes run on one device")
    if method in ("ulysses", "late_ulysses") and heads % U:
        raise MeshError(f"{heads} query heads cannot be divided over sequence={U}: it must be a divisor")
    if batch % mesh.shape[DATA]:
        raise MeshError(f"{batch} rows cannot be divided over data={mesh.shape[DATA]}: it must be a divisor")
    if length < U:
        raise MeshError(
            f"{length} tokens cannot be divided over sequence={U}: each device needs one at least"
        )


@partial(jax.jit, static_argnames="mesh")
def _embed(embeddings: Embeddings, tokens: Array, length: Array, mesh: Mesh) -> Array:
    def local(embeddings: Embeddings, tokens: Array, length: Array) -> Array:
        # Padding takes the last position, so that it stays within the table of learned positions.
        return embeddings.embed(tokens, jnp.minimum(_positions(tokens), length - 1))

    return _over(mesh, local, PartitionSpec(), spec("B T"), PartitionSpec())(embeddings, tokens, length)


@partial(jax.jit, static_argnames=("ranks", "near", "mesh", "method", "implementation"))
def _layer(
    block: Block,
    x: Array,
    ranks: LayerRanks,
    near: tuple[int, int],
    mesh: Mesh,
    method: Method,
    implementation: Implementation | None,
) -> Array:
    """One layer. Jitted, so that layers alike are traced and compiled once."""
    attend = partial(
        sharded_attention,
        scale=block.attention.config.head_dim**-0.5,
        ranks=ranks,
        sinks=near[0],
        window=near[1],
        method=method,
        implementation=implementation,
    )
    local = lambda block, x: block(x, _positions(x), attend, implementation)
    return _over(mesh, local, PartitionSpec(), spec("B T D"))(block, x)


def _positions(x: Array) -> Array:
    """Of this device's tokens, for x [B, t, ...]."""
    B, t = x.shape[:2]
    return jnp.broadcast_to(jax.lax.axis_index(SEQUENCE) * t + jnp.arange(t), (B, t))


def _over(mesh: Mesh, local: Callable[..., Array], *in_specs: PartitionSpec) -> Callable[..., Array]:
    """`local` on each device, from divided arguments to hidden states."""
    # Replication is not checked: kernels do not say along which axes their results vary.
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec("B T D"), check_vma=False)
