"""New tokens from the projections into the cache in one launch: turned, coded, put in their places (ours).

Queries and keys get the rotary embedding and each head's basis, as `post_rope` gives them. Keys and values
are rounded to planes of integers, as `encode` rounds them, and written to their slots of the store; those of
single tokens also to the ring of near tokens. So no pass over what is new comes after.

A program has some tokens of one query head, or of one KV head's keys or values. It holds them in registers
from the product with the basis to the packed levels.

Pallas' Triton back end runs it, which JAX is to give up: then `check_turn_and_store` refuses, and `post_rope`
and XLA do its work.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.coded_inputs import Plane, check_plane, rows_of
from kernels_pallas.common import Shaped
from kernels_pallas.encode import coded, packed
from kernels_pallas.triton import check_back_end, check_offsets, pieces, plt

ROWS = 16
"""Tokens of a program at least, for products on tensor cores; those that are not there are masked."""
MOST_ROWS = 64
"""Of a program, of a prompt."""
HEADS = (32, 64, 128, 256)
"""Head dimensions: halves that are powers of two, as Triton wants."""


class Turning(NamedTuple):
    """What turns new queries and keys: cosines and sines [B, T, H/2] float32; the bases of a KV head, q and k
    [K, H, C], and what is added to keys [K, C] or None, as `post_rope` takes them."""

    cos: Array
    sin: Array
    q: Array
    k: Array
    shift: Array | None = None


class Stored(NamedTuple):
    """What keeps keys, or values: planes of the store that take the first coordinates one after another, and
    the ring [B, K, M, all coordinates] in 16 bits, in one plane of integers, or None."""

    planes: Sequence[Plane]
    ring: Array | Plane | None = None


class _Form(NamedTuple):
    """Static shape of a `Stored`: bits and coordinates of its planes, and of the ring: 16 or bits of a plane,
    0 without one."""

    planes: tuple[tuple[int, int], ...]
    ring: int

    @property
    def arrays(self) -> int:
        """That it has."""
        return 2 * len(self.planes) + (self.ring > 0) + (0 < self.ring < 16)


class _Geometry(NamedTuple):
    """Static shape of a launch. rows: tokens of a program. near: sinks and window."""

    B: int
    T: int
    S: int
    G: int
    H: int
    C: int
    rows: int
    near: tuple[int, int]
    paged: bool
    shifted: bool
    with_q: bool
    gives_k: bool
    together: bool
    """q, k and v are heads of one array."""
    k: _Form
    v: _Form


def turn_and_store(
    q: Float[Array, "B T N H"] | None,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    turning: Turning,
    k_stored: Stored,
    v_stored: Stored,
    starts: Int[Array, " B"],
    ends: Int[Array, " B"],
    *,
    sinks: int = 0,
    window: int = 0,
    block_table: Int[Array, "B pages"] | None = None,
    interpret: bool = False,
) -> tuple[Array | None, Array | None, Stored, Stored]:
    """Turned queries and keys, and what keeps new keys and values, with those at starts … starts + T - 1
    below `ends`; other slots keep what they hold.

    Args:
      q, k, v: bfloat16 or float16, as projections give them; without q none is turned.
      turning: C is H where there is a ring, else at least what the planes of keys take.
      k_stored, v_stored: of turned keys, and of values. Both have a ring or none, and only with T = 1.
      starts, ends: of each row, int32; nothing is written from S on.
      sinks, window: of the ring: position p of the window is in slot p mod window, sink p in slot window + p.
      block_table: with it planes of the stores are a pool of pages (`Plane`), of any size; a token is not
        written where its entry is not one of the pool's. The rings are in rows.
      interpret: on any device, slowly.

    Returns:
      q' [B, T, N, C], None without q; k' [B, T, K, C], None where T = 1;
      what keeps keys and values, in the same memory, where its arrays are given away.

    Raises:
      ValueError: a shape or dtype not allowed, named with its value, before launch.
      NotImplementedError: JAX has no Triton back end.
    """
    near: dict[str, Any] = {"sinks": sinks, "window": window, "block_table": block_table}
    check_turn_and_store(q, k, v, turning, k_stored, v_stored, starts, ends, **near)
    forms = _form(k_stored), _form(v_stored)
    arrays = _arrays(k_stored), _arrays(v_stored)
    turned, new_k, *found = _launch(
        q,
        k,
        v,
        turning,
        arrays,
        starts,
        ends,
        block_table,
        forms=forms,
        near=(sinks, window),
        interpret=interpret,
    )
    k_stored, v_stored = (_stored(*pair) for pair in zip(forms, found, strict=True))
    return turned, new_k, k_stored, v_stored


def check_turn_and_store(
    q: Shaped | None,
    k: Shaped,
    v: Shaped,
    turning: Turning,
    k_stored: Stored,
    v_stored: Stored,
    starts: Shaped,
    ends: Shaped,
    *,
    sinks: int = 0,
    window: int = 0,
    block_table: Shaped | None = None,
) -> None:
    """Raises what `turn_and_store` says it raises; arrays and options are those given to it."""
    common.check_device()
    check_back_end()
    B, T, K, H = k.shape
    if H not in HEADS:
        raise ValueError(f"k has {H} coordinates: must be one of {HEADS}")
    C = turning.k.shape[-1]
    common.check_dtypes(k=k, v=v)
    common.check_shape("v", v, (B, T, K, None), "B, T, K, Hv")
    if q is not None:
        common.check_dtypes(k=k, q=q)
        common.check_shape("q", q, (B, T, None, H), "B, T, N, H")
        common.check_groups(q.shape[2], K)
    for name in ("cos", "sin"):
        common.check_shape(f"turning.{name}", getattr(turning, name), (B, T, H // 2), "B, T, H/2")
    for name in ("q", "k"):
        common.check_shape(f"turning.{name}", getattr(turning, name), (K, H, C), "K, H, C")
    if turning.shift is not None:
        common.check_shape("turning.shift", turning.shift, (K, C), "K, C")
    if C % 16 or not 0 < C <= 256:
        raise ValueError(f"turning.k has {C} columns: must be a multiple of 16 up to 256")
    lead, _, slots = k_stored.planes[0].reach.shape
    if block_table is not None:
        common.check_table(block_table, B, k_stored.planes[0].reach, 1)
    tokens = B if block_table is None else lead, K, slots
    for name, stored, width in (("k_stored", k_stored, C), ("v_stored", v_stored, v.shape[3])):
        for i, plane in enumerate(stored.planes):
            check_plane(f"{name}.planes[{i}]", plane, tokens)
            check_offsets(f"{name}.planes[{i}]", plane)
        if (taken := sum(plane.width for plane in stored.planes)) > width:
            raise ValueError(f"{name}.planes take {taken} coordinates: must be at most {width}")
        _check_ring(f"{name}.ring", stored.ring, (B, K, sinks, window, width), k, T)
    if (k_stored.ring is None) != (v_stored.ring is None):
        raise ValueError("k_stored and v_stored: must both have a ring, or none")
    for name, row in (("starts", starts), ("ends", ends)):
        common.check_shape(name, row, (B,), "B")


def _check_ring(name: str, ring: Any, sizes: tuple[int, int, int, int, int], k: Shaped, T: int) -> None:
    """Raises `ValueError` for a ring that does not fit these B, K, sinks, window and coordinates."""
    if ring is None:
        return
    B, K, sinks, window, width = sizes
    if T > 1:
        raise ValueError(f"{name} with T={T}: must be 1, for pieces of prompts need the ring as it was")
    slots = (ring.reach if isinstance(ring, Plane) else ring).shape[2]
    if sinks < 0 or window < 0 or sinks + window > slots:
        raise ValueError(
            f"sinks={sinks}, window={window}: must be 0 to {slots} together, the slots of {name}"
        )
    if isinstance(ring, Plane):
        check_plane(name, ring, (B, K, slots))
        check_offsets(name, ring)
        if ring.width != width:
            raise ValueError(f"{name} has {ring.width} coordinates: must be {width}")
        return
    common.check_shape(name, ring, (B, K, slots, width), "B, K, M, coordinates")
    common.check_dtypes(k=k, **{name: ring})
    if (size := 2 * math.prod(ring.shape)) > 2**31:
        raise ValueError(f"{name} has {size} bytes: must be at most 2^31")


def _form(stored: Stored) -> _Form:
    ring = 0 if stored.ring is None else stored.ring.bits if isinstance(stored.ring, Plane) else 16
    return _Form(tuple((plane.bits, plane.width) for plane in stored.planes), ring)


def _arrays(stored: Stored) -> list[Array]:
    """All that are written: levels and reach of each plane, and the ring's."""
    flat = [x for plane in stored.planes for x in (plane.levels, plane.reach)]
    if stored.ring is None:
        return flat
    return [*flat, *stored.ring[:2]] if isinstance(stored.ring, Plane) else [*flat, stored.ring]


def _stored(form: _Form, arrays: Sequence[Array]) -> Stored:
    """The inverse of `_arrays`."""
    rest = iter(arrays)
    planes = [Plane(next(rest), next(rest), bits) for bits, _ in form.planes]
    if not form.ring:
        return Stored(planes)
    return Stored(planes, next(rest) if form.ring == 16 else Plane(next(rest), next(rest), form.ring))


@functools.partial(jax.jit, static_argnames=("forms", "near", "interpret"))
def _launch(
    q: Array | None,
    k: Array,
    v: Array,
    turning: Turning,
    arrays: tuple[list[Array], list[Array]],
    starts: Array,
    ends: Array,
    block_table: Array | None,
    *,
    forms: tuple[_Form, _Form],
    near: tuple[int, int],
    interpret: bool,
) -> tuple[Array | None, Array | None, list[Array], list[Array]]:
    """`turn_and_store`, checked."""
    B, T, K, H = k.shape
    G, C = 0 if q is None else q.shape[2] // K, turning.k.shape[-1]
    g = _Geometry(
        B=B,
        T=T,
        S=rows_of(arrays[0][1], block_table)[2],
        G=G,
        H=H,
        C=C,
        rows=ROWS if T == 1 else min(MOST_ROWS, max(ROWS, pl.next_power_of_2(B * T))),
        near=near,
        paged=block_table is not None,
        shifted=turning.shift is not None,
        with_q=q is not None,
        gives_k=T > 1,
        # Where products with weights were one, XLA gives their results as one without a copy.
        together=T == 1 and q is not None and v.shape[3] == H,
        k=forms[0],
        v=forms[1],
    )
    new = [x for x in (q, k, v) if x is not None]
    given = [jnp.concatenate(new, axis=2)] if g.together else new
    given += [] if q is None else [turning.q]
    given += [turning.k, turning.cos, turning.sin, starts.astype(jnp.int32), ends.astype(jnp.int32)]
    given += [] if block_table is None else [block_table]
    given += [] if turning.shift is None else [turning.shift.astype(jnp.float32)]
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    made = [] if q is None else [jax.ShapeDtypeStruct((B, T, K * G, C), q.dtype)]
    made += [jax.ShapeDtypeStruct((B, T, K, C), k.dtype)] if g.gives_k else []
    held = [*arrays[0], *arrays[1]]
    found = pl.pallas_call(
        functools.partial(_kernel, g=g),
        out_shape=[*made, *map(like, held)],
        grid=(K, pl.cdiv(B * T, g.rows), G + 2),
        input_output_aliases={len(given) + i: len(made) + i for i in range(len(held))},
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="zdc_turn_and_store",
    )(*given, *held)
    rest = iter(found)
    turned = next(rest) if g.with_q else None
    new_k = next(rest) if g.gives_k else None
    return turned, new_k, [next(rest) for _ in arrays[0]], list(rest)


def _kernel(*refs: Any, g: _Geometry) -> None:
    rest = iter(refs)
    take = lambda count: [next(rest) for _ in range(count)]
    q_ref, k_ref, v_ref = take(1) * 3 if g.together else [None] * (not g.with_q) + take(2 + g.with_q)
    (q_basis,) = take(1) if g.with_q else (None,)
    k_basis, cos_ref, sin_ref, starts, ends = take(5)
    (table,) = take(1) if g.paged else (None,)
    (shift,) = take(1) if g.shifted else (None,)
    take(g.k.arrays + g.v.arrays)  # The same memory as results.
    (q_out,) = take(1) if g.with_q else (None,)
    (k_out,) = take(1) if g.gives_k else (None,)
    k_held, v_held = take(g.k.arrays), take(g.v.arrays)
    kv, K, part = pl.program_id(0), pl.num_programs(0), pl.program_id(2)
    first_k, first_v = (K * g.G, K * (g.G + 1)) if g.together else (0, 0)
    tokens = _Tokens(g, pl.program_id(1) * g.rows + lax.broadcasted_iota(jnp.int32, (g.rows, 1), 0))
    angles = cos_ref, sin_ref

    if g.with_q:

        @pl.when(part < g.G)
        def _queries() -> None:
            head = kv * g.G + part
            turned = tokens.turned(q_ref, head, angles, q_basis, kv)
            for begin, width in pieces(g.C):
                tokens.put(q_out, head, begin, turned(begin, width))

    @pl.when(part == g.G)
    def _keys() -> None:
        turned = tokens.turned(k_ref, first_k + kv, angles, k_basis, kv)

        def piece(begin: int, width: int) -> Array:
            y = turned(begin, width)
            if shift is not None:
                y += plt.load(shift.at[kv, pl.ds(begin, width)])[None]
            return y.astype(k_ref.dtype)

        found = _by_planes(g.k, g.C, piece)
        if k_out is not None:
            for begin, x in _all(found):
                tokens.put(k_out, kv, begin, x)
        _keep(tokens, kv, found, g.k, k_held, (starts, ends, table))

    @pl.when(part == g.G + 1)
    def _values() -> None:
        piece = lambda begin, width: tokens.get(v_ref, first_v + kv, begin, width)
        _keep(tokens, kv, _by_planes(g.v, v_ref.shape[-1], piece), g.v, v_held, (starts, ends, table))


class _Tokens(NamedTuple):
    """Tokens of a program: `at` [rows, 1] counts those of all rows."""

    g: _Geometry
    at: Array

    @property
    def there(self) -> Array:
        return self.at < self.g.B * self.g.T

    @property
    def place(self) -> tuple[Array, Array]:
        """Row and index in it; past the last row of tokens that are not there."""
        return lax.div(self.at, jnp.int32(self.g.T)), lax.rem(self.at, jnp.int32(self.g.T))

    def get(self, ref: Any, head: Array, begin: int, width: int) -> Array:
        """[rows, width] of an array [B, T, heads, ·]."""
        return plt.load(ref.at[*self.place, head, _columns(begin, width)], mask=self.there, other=0.0)

    def put(self, ref: Any, head: Array, begin: int, x: Array) -> None:
        """The inverse of `get`."""
        at = ref.at[*self.place, head, _columns(begin, x.shape[1])]
        plt.store(at, x.astype(ref.dtype), mask=jnp.broadcast_to(self.there, x.shape))

    def turned(self, ref: Any, head: Array, angles: tuple[Any, Any], basis: Any, kv: Array) -> Any:
        """What gives columns of RoPE(x) A, float32 [rows, width], by their begin and width."""
        half = self.g.H // 2
        low, high = (self.get(ref, head, i * half, half).astype(jnp.float32) for i in range(2))
        cos, sin = (
            plt.load(each.at[*self.place, _columns(0, half)], mask=self.there, other=0.0) for each in angles
        )
        halves = (low * cos - high * sin).astype(basis.dtype), (high * cos + low * sin).astype(basis.dtype)

        def columns(begin: int, width: int) -> Array:
            rows = lambda i: plt.load(basis.at[kv, pl.ds(i * half, half), pl.ds(begin, width)])
            product = lambda x, a: lax.dot_general(
                x, a, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            return product(halves[0], rows(0)) + product(halves[1], rows(1))

        return columns


def _columns(begin: int, width: int) -> Array:
    return begin + lax.broadcasted_iota(jnp.int32, (1, width), 1)


Pieces = list[tuple[int, Array]]
"""Begins of columns, and the columns [rows, width]."""


def _by_planes(form: _Form, width: int, piece: Any) -> list[Pieces]:
    """The pieces of each plane, begins within it, and those of the coordinates that no plane takes."""
    found, first = [], 0
    for C in (*(C for _, C in form.planes), width - sum(C for _, C in form.planes)):
        found.append([(begin, piece(first + begin, size)) for begin, size in pieces(C)])
        first += C
    return found


def _all(found: list[Pieces]) -> Iterator[tuple[int, Array]]:
    """All pieces, begins among all coordinates."""
    first = 0
    for each in found:
        for _, x in each:
            yield first, x
            first += x.shape[1]


def _keep(
    tokens: _Tokens,
    kv: Array,
    found: list[Pieces],
    form: _Form,
    held: Sequence[Any],
    places: tuple[Any, Any, Any],
) -> None:
    """Writes keys or values to the store and to the ring."""
    g, (starts, ends, table), rest = tokens.g, places, iter(held)
    b, t = tokens.place
    of_row = lambda ref: plt.load(ref.at[b], mask=tokens.there, other=0)
    position, end = of_row(starts) + t, of_row(ends)
    new = tokens.there & (position < end)
    kept, lead, slot = new & (position < g.S), b, position
    if table is not None:
        first, *_ = held
        pages, page = first.shape[0], first.shape[2]
        entry = jnp.clip(lax.div(position, jnp.int32(page)), 0, table.shape[1] - 1)
        lead = plt.load(table.at[b, entry], mask=tokens.there, other=-1)
        slot = lax.rem(position, jnp.int32(page))
        kept &= (lead >= 0) & (lead < pages)
    for each, (bits, C) in zip(found, form.planes, strict=False):
        _put_coded(each, C, bits, next(rest), next(rest), (lead, kv, slot), kept)
    if not form.ring:
        return
    sinks, window = g.near
    slot = jnp.where(position < sinks, window + position, lax.rem(position, jnp.int32(max(window, 1))))
    kept = new & (position < sinks) if not window else new
    whole = list(_all(found))
    if form.ring < 16:
        C = sum(x.shape[1] for _, x in whole)
        _put_coded(whole, C, form.ring, next(rest), next(rest), (b, kv, slot), kept)
        return
    ring = next(rest)
    for begin, x in whole:
        at = ring.at[b, kv, slot, _columns(begin, x.shape[1])]
        plt.store(at, x, mask=jnp.broadcast_to(kept, x.shape))


def _put_coded(
    x: Pieces, C: int, bits: int, levels_ref: Any, reach_ref: Any, at: tuple[Array, Array, Array], kept: Array
) -> None:
    """Codes tokens [rows, C], and writes the `kept` ones to a plane at (row or page, KV head, slot)."""
    zero = lambda piece: jnp.where(kept, piece.astype(jnp.float32), 0.0)
    levels, reach = coded([zero(piece) for _, piece in x], bits)
    for (begin, _), level in zip(x, levels, strict=True):
        for place, size, part in packed(level, C, begin, bits):
            taken = levels_ref.at[*at, _columns(place, size)]
            plt.store(taken, part, mask=jnp.broadcast_to(kept, part.shape))
    plt.store(reach_ref.at[*at], reach[:, None], mask=kept)
