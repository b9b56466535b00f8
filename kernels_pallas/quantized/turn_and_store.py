"""New tokens from the projections into the cache in one launch: rotated, quantized and stored (ours).

    grid: (K, ⌈B/16⌉, parts), Triton; 4 warps per program
    G parts:                       queries of one head:   RoPE → basis → store, also as attention reads them
    planes of the store, and ring: keys of one KV head:   RoPE → basis → quantize → plane or ring
    planes of the store, and ring: values of one KV head: quantize → plane or ring

Queries and keys get rotary embedding and basis as in `post_rope`. Keys and values are rounded to planes of
integers as in `encode`, and written to their slots of the store and of the ring of near tokens. No other pass
over the new tokens follows.

The kernel serves one token per sequence, where launches dominate the time. Its longest chain are reductions
of keys, which cross warps after the product. So each plane and the ring have their own program, and several
programs compute the same product. A program keeps its values in registers from the product with the basis to
the packed levels. It issues all loads before it waits for any.

JAX plans to drop Pallas' Triton back end. Without it `check_turn_and_store` raises, and `post_rope` and XLA
do the work.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.quantized.encode import coded, packed
from kernels_pallas.quantized.inputs import Plane, check_plane, rows_of
from kernels_pallas.quantized.queries import PlaneForm, columns_of, place_of
from kernels_pallas.triton import check_back_end, check_offsets, pieces, plt

ROWS = 16
"""Rows of a program, for products on tensor cores; rows past the batch are masked."""
WARPS = 4
"""Warps of a program."""
HEADS = (32, 64, 128, 256)
"""Allowed head dimensions: their halves are powers of two, as Triton requires."""


class Turning(NamedTuple):
    """Rotary embedding and basis of new queries and keys.

    Attributes:
      cos: cosines of the rotary angles, [B, H/2] float32.
      sin: sines of the rotary angles, [B, H/2] float32.
      q: basis of queries, [K, H, H], as in `post_rope`.
      k: basis of keys, [K, H, H].
    """

    cos: Array
    sin: Array
    q: Array
    k: Array


class Stored(NamedTuple):
    """Cache of keys, or of values.

    Attributes:
      planes: planes of the store, for the first coordinates one after another.
      ring: ring of near tokens, [B, K, M, all coordinates], in 16 bits or in one plane of integers.
    """

    planes: Sequence[Plane]
    ring: Array | Plane


class TurnedQueries(NamedTuple):
    """Queries after rotary embedding and basis.

    Attributes:
      plain: queries, [B, N, H].
      far: queries arranged for the planes of the store (`arrange_queries`), [B, K, columns, coordinates].
      near: queries arranged for the ring; None if the ring has 16 bits.
    """

    plain: Array
    far: Array
    near: Array | None


class _Form(NamedTuple):
    """Static shape of a `Stored`.

    Attributes:
      planes: bits and coordinates of each plane.
      ring: bits of the ring, 16 or those of its plane.
    """

    planes: tuple[tuple[int, int], ...]
    ring: int

    @property
    def arrays(self) -> int:
        """Number of arrays."""
        return 2 * len(self.planes) + (1 if self.ring == 16 else 2)

    def read_by(self, width: int) -> list[list[PlaneForm]]:
        """Return coordinates and bits of the planes of the store; then those of a ring of integers."""
        store = [(C, bits) for bits, C in self.planes]
        return [store] if self.ring == 16 else [store, [(width, self.ring)]]

    @property
    def programs(self) -> int:
        """Number of programs that write: one for each plane of the store, and one for the ring."""
        return len(self.planes) + 1

    def destinations(self, width: int) -> list[list[tuple[int, int]]]:
        """Return the spans of coordinates that each program writes."""
        spans = self.spans(width)
        return [*spans[:-1], [span for each in spans for span in each]]

    def spans(self, width: int) -> list[list[tuple[int, int]]]:
        """Return begins and widths of parts of each plane's coordinates, and of those without a plane."""
        found, first = [], 0
        for C in (*(C for _, C in self.planes), width - sum(C for _, C in self.planes)):
            found.append([(first + begin, size) for begin, size in pieces(C)])
            first += C
        return found


class _Geometry(NamedTuple):
    """Static shape of a launch.

    `near` is sinks and window; `together` means that q, k and v are heads of one array.
    """

    B: int
    S: int
    G: int
    H: int
    near: tuple[int, int]
    paged: bool
    together: bool
    k: _Form
    v: _Form


def join_heads(
    q: Float[Array, "*B N H"], k: Float[Array, "*B K H"], v: Float[Array, "*B K Hv"]
) -> list[Array]:
    """Return the heads of new tokens as `turn_and_store` reads them: in one array if all are equally wide.

    XLA copies its products into that array once. Duplicate a single token before them: a vector product would
    be summed within the concatenation, slowly, one element per thread.
    """
    return [jnp.concatenate([q, k, v], axis=-2)] if q.shape[-1] == v.shape[-1] else [q, k, v]


def turn_and_store(
    heads: Sequence[Float[Array, "B _ _"]],
    turning: Turning,
    k_stored: Stored,
    v_stored: Stored,
    starts: Int[Array, " B"],
    ends: Int[Array, " B"],
    *,
    sinks: int,
    window: int,
    block_table: Int[Array, "B pages"] | None = None,
    interpret: bool = False,
) -> tuple[TurnedQueries, Stored, Stored]:
    """Rotate new queries and keys, and store keys and values; other slots keep their contents.

    Each sequence's token goes to its start, if that is below `ends`.

    Args:
      heads: queries [B, N, H], keys [B, K, H] and values [B, K, Hv] as projected, bfloat16 or float16; or all
        in this order in one array (`join_heads`).
      turning: rotary embedding and basis.
      k_stored: cache of rotated keys.
      v_stored: cache of values.
      starts: slot of the new token of each sequence, int32.
      ends: end of the slots of each sequence, int32; nothing is written to the stores from S on.
      sinks: sinks of the rings; sink p is in slot window + p.
      window: window of the rings; position p is in slot p mod window.
      block_table: table of pools of pages (`Plane`) of any size, for the stores. A token with an invalid
        entry is not written there. Rings are not paged.
      interpret: whether to run on any device, slowly.

    Returns:
      Rotated queries in all forms that attention reads, and both caches, in the same memory if their arrays
      are donated.

    Raises:
      ValueError: a shape or dtype is not allowed. Raised before launch, with name and value.
      NotImplementedError: JAX has no Triton back end.
    """
    options: dict[str, Any] = {"sinks": sinks, "window": window, "block_table": block_table}
    check_turn_and_store(heads, turning, k_stored, v_stored, starts, ends, **options)
    forms = _form(k_stored), _form(v_stored)
    arrays = _arrays(k_stored), _arrays(v_stored)
    (plain, far, *near), *found = _launch(
        list(heads),
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
    return TurnedQueries(plain, far, *(near or [None])), k_stored, v_stored


def check_turn_and_store(
    heads: Sequence[Shaped],
    turning: Turning,
    k_stored: Stored,
    v_stored: Stored,
    starts: Shaped,
    ends: Shaped,
    *,
    sinks: int,
    window: int,
    block_table: Shaped | None = None,
) -> None:
    """Check the arguments of `turn_and_store`; errors are those it documents."""
    common.check_device()
    check_back_end()
    K, H = turning.k.shape[:2]
    k, Hv = _check_heads(heads, K, H)
    B, N = k.shape[0], max(0, heads[0].shape[1] - (2 * K if len(heads) == 1 else 0))
    for name in ("cos", "sin"):
        common.check_shape(f"turning.{name}", getattr(turning, name), (B, H // 2), "B, H/2")
    for name in ("q", "k"):
        basis = getattr(turning, name)
        common.check_shape(f"turning.{name}", basis, (K, H, H), "K, H, H")
        if basis.dtype not in (jnp.float16, k.dtype):
            raise ValueError(
                f"turning.{name} has dtype {basis.dtype}: must be float16 or {k.dtype}, as k has"
            )
    for name, stored in (("k_stored", k_stored), ("v_stored", v_stored)):
        if not stored.planes:
            raise ValueError(f"{name}.planes={stored.planes}: must be at least one")
    lead, _, slots = k_stored.planes[0].reach.shape
    if block_table is not None:
        common.check_table(block_table, B, k_stored.planes[0].reach, 1)
    common.check_sizes(B=B, N=N, S=slots)
    tokens = B if block_table is None else lead, K, slots
    for name, stored, width in (("k_stored", k_stored, H), ("v_stored", v_stored, Hv)):
        for i, plane in enumerate(stored.planes):
            check_plane(f"{name}.planes[{i}]", plane, tokens)
            check_offsets(f"{name}.planes[{i}]", plane)
        if (taken := sum(plane.width for plane in stored.planes)) > width:
            raise ValueError(f"{name}.planes take {taken} coordinates: must be at most {width}")
        _check_ring(f"{name}.ring", stored.ring, (B, K, sinks, window, width), k)
    for name, row in (("starts", starts), ("ends", ends)):
        common.check_integers(name, row, (B,), "B")


def _check_heads(heads: Sequence[Shaped], K: int, H: int) -> tuple[Shaped, int]:
    """Return an array with keys, and the width of values; raise `ValueError` for wrong heads."""
    if H not in HEADS:
        raise ValueError(f"turning.k has {H} coordinates: must be one of {HEADS}")
    if len(heads) == 1:
        (x,) = heads
        common.check_shape("heads[0]", x, (None, None, H), "B, N + 2K, H")
        common.check_dtypes(**{"heads[0]": x})
        common.check_groups(max(0, x.shape[1] - 2 * K), K)
        return x, H
    if len(heads) != 3:
        raise ValueError(f"heads has {len(heads)} arrays: must be 1, or 3 of queries, keys and values")
    q, k, v = heads
    common.check_shape("heads[0]", q, (None, None, H), "B, N, H")
    common.check_shape("heads[1]", k, (q.shape[0], K, H), "B, K, H")
    common.check_shape("heads[2]", v, (q.shape[0], K, None), "B, K, Hv")
    common.check_dtypes(**{f"heads[{i}]": x for i, x in enumerate(heads)})
    common.check_groups(q.shape[1], K)
    return k, v.shape[2]


def _check_ring(name: str, ring: Any, sizes: tuple[int, int, int, int, int], k: Shaped) -> None:
    """Raise `ValueError` for a ring that does not fit these B, K, sinks, window and coordinates."""
    B, K, sinks, window, width = sizes
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
    ring = stored.ring.bits if isinstance(stored.ring, Plane) else 16
    return _Form(tuple((plane.bits, plane.width) for plane in stored.planes), ring)


def _arrays(stored: Stored) -> list[Array]:
    """Return all arrays that are written: levels and scales of each plane, and those of the ring."""
    flat = [x for plane in stored.planes for x in (plane.levels, plane.reach)]
    return [*flat, *stored.ring[:2]] if isinstance(stored.ring, Plane) else [*flat, stored.ring]


def _stored(form: _Form, arrays: Sequence[Array]) -> Stored:
    """Invert `_arrays`."""
    rest = iter(arrays)
    planes = [Plane(next(rest), next(rest), bits) for bits, _ in form.planes]
    return Stored(planes, next(rest) if form.ring == 16 else Plane(next(rest), next(rest), form.ring))


@functools.partial(jax.jit, static_argnames=("forms", "near", "interpret"))
def _launch(
    heads: list[Array],
    turning: Turning,
    arrays: tuple[list[Array], list[Array]],
    starts: Array,
    ends: Array,
    block_table: Array | None,
    *,
    forms: tuple[_Form, _Form],
    near: tuple[int, int],
    interpret: bool,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Launch `turn_and_store` on checked arguments; the first arrays are those of `TurnedQueries`."""
    (B, heads_of_first, _), (K, H) = heads[0].shape, turning.k.shape[:2]
    g = _Geometry(
        B=B,
        S=rows_of(arrays[0][1], block_table)[2],
        G=heads_of_first // K - (2 if len(heads) == 1 else 0),
        H=H,
        near=near,
        paged=block_table is not None,
        together=len(heads) == 1,
        k=forms[0],
        v=forms[1],
    )
    given = [*heads]
    given += [turning.q, turning.k, turning.cos, turning.sin]
    given += [starts.astype(jnp.int32), ends.astype(jnp.int32)]
    given += [] if block_table is None else [block_table]
    held = [*arrays[0], *arrays[1]]
    arranged = [(B, K, columns_of(g.G), sum(C for C, _ in form)) for form in g.k.read_by(H)]
    shapes = (B, K * g.G, H), *arranged
    queries = [jax.ShapeDtypeStruct(dims, heads[0].dtype) for dims in shapes]
    found = pl.pallas_call(
        functools.partial(_kernel, g=g),
        out_shape=[*queries, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held)],
        grid=(K, pl.cdiv(B, ROWS), g.G + g.k.programs + g.v.programs),
        input_output_aliases={len(given) + i: len(queries) + i for i in range(len(held))},
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="zdc_turn_and_store",
    )(*given, *held)
    turned, found = found[: len(queries)], found[len(queries) :]
    return turned, found[: len(arrays[0])], found[len(arrays[0]) :]


def _kernel(*refs: Any, g: _Geometry) -> None:
    rest = iter(refs)

    def take(count):
        return [next(rest) for _ in range(count)]

    q_ref, k_ref, v_ref = take(1) * 3 if g.together else take(3)
    q_basis, k_basis, cos, sin, starts, ends = take(6)
    (table,) = take(1) if g.paged else (None,)
    take(g.k.arrays + g.v.arrays)  # These share memory with the results.
    forms = g.k.read_by(g.H)
    (q_out,), arranged = take(1), list(zip(forms, take(len(forms)), strict=True))
    k_held, v_held = take(g.k.arrays), take(g.v.arrays)
    kv, K, part = pl.program_id(0), pl.num_programs(0), pl.program_id(2)
    first_k, first_v = (K * g.G, K * (g.G + 1)) if g.together else (0, 0)
    rows = _Rows(g, pl.program_id(1) * ROWS + lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0))

    @pl.when(part < g.G)
    def _queries() -> None:
        head, spans = kv * g.G + part, pieces(g.H)
        turned = rows.turned(q_ref, head, (cos, sin), q_basis, kv, spans)
        for _, out in arranged:
            rows.fill_missing(out, kv, part)
        for (begin, _), x in zip(spans, turned, strict=True):
            rows.put(q_out, head, begin, x.astype(q_out.dtype))
            for form, out in arranged:
                rows.put_arranged(out, kv, part, begin, x.astype(out.dtype), form)

    def put_keys(index: int) -> None:
        spans = g.k.destinations(g.H)[index]
        turned = rows.turned(k_ref, first_k + kv, (cos, sin), k_basis, kv, spans)
        places = rows.places(starts, ends, table, k_held[0].shape)
        _put(places, kv, [x.astype(k_ref.dtype) for x in turned], spans, g.k, k_held, index)

    def put_values(index: int) -> None:
        spans = g.v.destinations(v_ref.shape[2])[index]
        places = rows.places(starts, ends, table, v_held[0].shape)
        x = [rows.get(v_ref, *span, first_v + kv) for span in spans]
        _put(places, kv, x, spans, g.v, v_held, index)

    for index in range(g.k.programs):
        pl.when(part == g.G + index)(functools.partial(put_keys, index))
    for index in range(g.v.programs):
        pl.when(part == g.G + g.k.programs + index)(functools.partial(put_values, index))


class _Places(NamedTuple):
    """Destinations of the tokens of rows, [ROWS, 1] each.

    Attributes:
      lead: sequence or page in the store.
      slot: slot in the store.
      kept: whether the token is written to the store.
      row: sequence.
      near_slot: slot in the ring.
      near: whether the token is written to the ring.
    """

    lead: Array
    slot: Array
    kept: Array
    row: Array
    near_slot: Array
    near: Array


class _Rows(NamedTuple):
    """Rows of a program, [ROWS, 1]."""

    g: _Geometry
    row: Array

    @property
    def there(self) -> Array:
        return self.row < self.g.B

    def get(self, ref: Any, begin: int, width: int, *head: Array) -> Array:
        """Load [ROWS, width] of an array [B, ·], or of a head of [B, heads, ·]."""
        at = ref.at[self.row, *head, _columns(begin, width)]
        return plt.load(at, mask=self.there, other=0.0)

    def put(self, ref: Any, head: Array, begin: int, x: Array) -> None:
        """Store into one head; the inverse of `get`."""
        at = ref.at[self.row, head, _columns(begin, x.shape[1])]
        plt.store(at, x, mask=jnp.broadcast_to(self.there, x.shape))

    def put_arranged(
        self, ref: Any, kv: Array, member: Array, begin: int, x: Array, form: Sequence[PlaneForm]
    ) -> None:
        """Store coordinates of one head of a group into arranged queries [B, K, columns, R]."""
        coordinate = _columns(begin, x.shape[1])
        mask = self.there & (coordinate < ref.shape[3])
        plt.store(ref.at[self.row, kv, member, place_of(coordinate, form)], x, mask=mask)

    def fill_missing(self, ref: Any, kv: Array, member: Array) -> None:
        """Store zeros into a share of the columns of arranged queries that no head has."""
        _, _, count, R = ref.shape
        for column in range(self.g.G, count, self.g.G):
            for begin, width in pieces(R):
                at = ref.at[self.row, kv, member + column, _columns(begin, width)]
                mask = jnp.broadcast_to(self.there & (member + column < count), (ROWS, width))
                plt.store(at, jnp.zeros((ROWS, width), ref.dtype), mask=mask)

    def turned(
        self,
        ref: Any,
        head: Array,
        angles: tuple[Any, Any],
        basis: Any,
        kv: Array,
        spans: Sequence[tuple[int, int]],
    ) -> list[Array]:
        """Return columns of RoPE(x) A, float32 [ROWS, ·], for the given begins and widths."""
        half = self.g.H // 2
        rows = [pl.ds(i * half, half) for i in range(2)]
        bases = [[plt.load(basis.at[kv, each, pl.ds(*span)]) for each in rows] for span in spans]
        low, high = (self.get(ref, i * half, half, head).astype(jnp.float32) for i in range(2))
        cos, sin = (self.get(each, 0, half) for each in angles)
        dtype = bases[0][0].dtype
        halves = (low * cos - high * sin).astype(dtype), (high * cos + low * sin).astype(dtype)

        def product(x, a):
            return lax.dot_general(x, a, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        return [product(halves[0], first) + product(halves[1], second) for first, second in bases]

    def places(self, starts: Any, ends: Any, table: Any, pool: tuple[int, ...]) -> _Places:
        """Return where the new tokens at `starts` go; `pool` is the shape of a plane's levels."""
        g, (sinks, window) = self.g, self.g.near

        def of_row(ref):
            return plt.load(ref.at[self.row], mask=self.there, other=0)

        position, end = of_row(starts), of_row(ends)
        new = self.there & (position < end)
        kept, lead, slot = new & (position < g.S), self.row, position
        if table is not None:
            pages, page = pool[0], pool[2]
            entry = jnp.clip(lax.div(position, jnp.int32(page)), 0, table.shape[1] - 1)
            lead = plt.load(table.at[self.row, entry], mask=self.there, other=-1)
            slot = lax.rem(position, jnp.int32(page))
            kept &= (lead >= 0) & (lead < pages)
        recent = lax.rem(position, jnp.int32(max(window, 1)))
        near_slot = jnp.where(position < sinks, window + position, recent)
        near = new if window else new & (position < sinks)
        return _Places(lead, slot, kept, self.row, near_slot, near)


def _columns(begin: int, width: int) -> Array:
    return begin + lax.broadcasted_iota(jnp.int32, (1, width), 1)


def _put(
    places: _Places,
    kv: Array,
    x: Sequence[Array],
    spans: Sequence[tuple[int, int]],
    form: _Form,
    held: Sequence[Any],
    index: int,
) -> None:
    """Write spans of keys or values to one destination of the form: a plane of the store, or the ring."""
    near, begins = (places.row, kv, places.near_slot), [begin for begin, _ in spans]
    pieces = [(begin - begins[0], piece) for begin, piece in zip(begins, x, strict=True)]
    width = sum(size for _, size in spans)
    if index < len(form.planes):
        levels, reach = held[2 * index : 2 * index + 2]
        at = places.lead, kv, places.slot
        _put_coded(pieces, width, form.planes[index][0], levels, reach, at, places.kept)
    elif form.ring < 16:
        levels, reach = held[-2:]
        _put_coded(pieces, width, form.ring, levels, reach, near, places.near)
    else:
        for begin, piece in pieces:
            mask = jnp.broadcast_to(places.near, piece.shape)
            plt.store(held[-1].at[*near, _columns(begin, piece.shape[1])], piece, mask=mask)


def _put_coded(
    x: Sequence[tuple[int, Array]],
    C: int,
    bits: int,
    levels_ref: Any,
    reach_ref: Any,
    at: tuple[Array, Array, Array],
    kept: Array,
) -> None:
    """Quantize parts of tokens [ROWS, C], each with its begin, and write the `kept` ones to a plane.

    `at` is (sequence or page, KV head, slot).
    """
    levels, reach = coded([piece.astype(jnp.float32) for _, piece in x], bits)
    for (begin, _), level in zip(x, levels, strict=True):
        for place, size, part in packed(level, C, begin, bits):
            taken = levels_ref.at[*at, _columns(place, size)]
            plt.store(taken, part, mask=jnp.broadcast_to(kept, part.shape))
    plt.store(reach_ref.at[*at], reach[:, None], mask=kept)
