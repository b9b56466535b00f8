"""Selection of the k largest scores of each row, exact and deterministic (ours).

    grid: (B, K, parts); 128 threads per CTA
    1. sample one score in 16: find a limit that about 2 k keys of the row are below
    2. stream the row through shared memory (`STAGES` blocks in flight), each block:
           TMA scores → ready[slot]; wait ready[slot] → collect keys below the limit
    3. find the k smallest collected keys, 11 bits at a time by histograms

Scores become keys, unsigned integers that decrease with the score. Candidates are collected in shared memory
in the order of their slots. A row is thus read once, 4 S bytes, plus the sample. A score costs some integer
operations, but no FLOP. If the sample was
misleading, there are too few candidates, or more than shared memory holds, as with very many equal scores.
Then the row itself is searched, which reads it up to four times.

The search settles digits of 11 bits from the top. A histogram of one digit, over keys that agree in the
settled bits, shows the bin of the k-th smallest key. Of keys equal to it the lowest slots are taken.
Concurrent threads only count, so their order does not matter.

One CTA processes one row. If there are few long rows, most of the device would be idle. Then several CTAs
each take a part of a row and keep at most its k best, and a second launch selects from these.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from kernels_pallas.common import SMS, checked_by
from kernels_pallas.lowering import lower_once
from kernels_pallas.mgpu_ext import (
    RUN,
    WARPS,
    add_ones,
    append,
    gather,
    iota,
    load,
    sums_before,
    the_one,
)
from kernels_pallas.select.inputs import LINE, THREADS, check_largest

BLOCK = 2048
"""Scores per step."""
STAGES = 2
"""Blocks in flight. Four CTAs have 64 KiB of them per multiprocessor, enough to saturate memory."""
STAGES_ALONE = 8
"""Blocks in flight with at most one CTA per multiprocessor; a power of two, which is fast to divide by."""
PART = 1024
"""Collected keys per step."""
HELD = 3 * PART
"""Smallest number of keys kept in shared memory, which leaves room for four CTAs per multiprocessor."""
DIGIT = 11
"""Bits per histogram."""
BINS = 1 << DIGIT
"""Bins of a histogram. With fewer bits left, the remaining bins count later keys, without effect."""
RUN_OF_BINS = BINS // THREADS
"""Consecutive bins per thread."""
LAST = np.uint32(2**32 - 1)
"""Key of slots out of range, after that of -inf."""
SIGN = np.uint32(1 << 31)
AT_ONCE = 4
"""CTAs per multiprocessor."""
LONG = 65536
"""Row length from which a second launch pays off."""
PARTS = 16
"""Largest number of parts of a row; each adds to the time of the second launch."""


@lower_once("k")
@checked_by(check_largest)
def largest(
    scores: Float[Array, "B K S"], begin: Int[Array, " B"], end: Int[Array, " B"], *, k: int
) -> Int[Array, "B K k"]:
    """Return the slots of the k largest scores of each row among begin ≤ j < end.

    Of equal scores the lowest slots are selected. NaN is larger than all numbers, so that it is not hidden,
    and 0 equals -0.

    Args:
      scores: float32, S a multiple of 64; slots out of range may have any value.
      begin: first slot of each sequence.
      end: end of the slots of each sequence.
      k: a multiple of 128 up to 4096.

    Returns:
      Slots, int32, ascending in each row, padded with S if fewer than k are in range.

    Raises:
      ValueError: a shape, dtype or k is not allowed. Raised before launch, with name and value.
      NotImplementedError: the GPU has another compute capability than 9.0.
    """
    B, K, S = scores.shape
    if S < BLOCK:
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, BLOCK - S)))
    parts = _parts(B * K, S, k)
    row = scores.reshape(B, K, -1, LINE), begin.astype(jnp.int32), end.astype(jnp.int32)
    launch = functools.partial(
        plgpu.kernel, grid=(B, K, parts), grid_names=("b", "kv", "part"), kernel_name="zdc_largest"
    )
    chosen = jax.ShapeDtypeStruct((B, K, k), jnp.int32)
    stages = STAGES if B * K * parts > SMS else STAGES_ALONE
    buffers = _Buffers.of(-(-max(HELD, 5 * k // 2) // PART) * PART, stages)
    if parts == 1:
        return launch(functools.partial(_whole_row, S), out_type=chosen, scratch_types=(buffers,))(*row)

    def of_parts(n, dtype):
        return jax.ShapeDtypeStruct((B, K, parts, n), dtype)

    best = launch(
        functools.partial(_part_of_row, S),
        out_type=(of_parts(k, jnp.uint32), of_parts(k, jnp.int32), of_parts(THREADS, jnp.int32)),
        scratch_types=(buffers,),
    )(*row)
    return launch(
        functools.partial(_best_of_parts, S),
        out_type=chosen,
        grid=(B, K),
        grid_names=("b", "kv"),
        scratch_types=(_Buffers.of(-(-parts * k // BLOCK) * BLOCK, STAGES),),
    )(*row, *best)


def _parts(rows: int, S: int, k: int) -> int:
    """Return the number of CTAs per row: as many as fit, if a second launch pays off.

    Candidates of all parts must fit into the shared memory of one CTA.
    """
    return 1 if S < LONG else max(1, min(PARTS, AT_ONCE * SMS // rows, PARTS * 1024 // k))


class _Buffers(NamedTuple):
    """Shared memory of a CTA: `keys` and `slots` are the collected candidates, `sums` scratch of warps."""

    counts: Any
    scores: Any
    keys: Any
    slots: Any
    sums: Any
    ready: Any

    @staticmethod
    def of(held: int, stages: int) -> "_Buffers":
        return _Buffers(
            counts=plgpu.SMEM((BINS,), jnp.int32),
            scores=plgpu.SMEM((stages, BLOCK // LINE, LINE), jnp.float32),
            keys=plgpu.SMEM((held,), jnp.uint32),
            slots=plgpu.SMEM((held,), jnp.int32),
            sums=plgpu.SMEM((WARPS,), jnp.int32),
            ready=plgpu.Barrier(num_barriers=stages),
        )

    @property
    def room(self) -> int:
        """Largest number of candidates."""
        return self.keys.shape[0]


class _Row(NamedTuple):
    """Scores [S/64, 64] in global memory, and the (possibly empty) range of valid slots begin ≤ j < end."""

    scores: Any
    begin: Array
    end: Array

    @staticmethod
    def of(S: int, scores_ref: Any, begin_ref: Any, end_ref: Any) -> "_Row":
        """Return the row of this CTA."""
        b, kv = lax.axis_index("b"), lax.axis_index("kv")
        begin, end = jnp.maximum(begin_ref[b], 0), jnp.minimum(end_ref[b], S)
        return _Row(scores_ref.at[b, kv], begin, jnp.maximum(begin, end))

    def part(self, index: Array, parts: int) -> "_Row":
        """Return one of `parts` parts with equal numbers of blocks."""
        first = lax.div(self.begin, jnp.int32(BLOCK))
        size = _blocks(_blocks(self.end, BLOCK) - first, parts) * BLOCK
        begin = first * BLOCK + index * size

        def within(slot):
            return jnp.clip(slot, self.begin, self.end)

        return self._replace(begin=within(begin), end=within(begin + size))

    @property
    def size(self) -> Array:
        """Number of valid slots."""
        return self.end - self.begin


def _whole_row(S: int, scores_ref: Any, begin_ref: Any, end_ref: Any, o_ref: Any, at: _Buffers) -> None:
    """Run one CTA on a whole row."""
    row = _Row.of(S, scores_ref, begin_ref, end_ref)
    wanted = jnp.minimum(row.size, o_ref.shape[-1])
    # With one score in 16 the limit is found among some 128 of the sample, few but accurate enough.
    limit = _likely(row, at, at.room * 2 // 3, 16, at.room)
    picked = _pick(_of_row(row, at), at, limit, None)
    _select(row, at, jnp.where((picked >= wanted) & (picked <= at.room), picked, 0), wanted)
    _put_out(o_ref, at, wanted, S)


def _part_of_row(
    S: int,
    scores_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    keys_ref: Any,
    slots_ref: Any,
    sizes_ref: Any,
    at: _Buffers,
) -> None:
    """Run one CTA on a part of a row: collect likely candidates, and keep the k best if there are more."""
    _, _, parts, k = keys_ref.shape
    row = _Row.of(S, scores_ref, begin_ref, end_ref)
    part = row.part(lax.axis_index("part"), parts)
    # All parts find the same limit. Collecting too many costs little, too few costs much.
    aim = max(3 * k, 4096)
    picked = _pick(_of_row(part, at), at, _likely(row, at, aim, 64, 2 * aim), None)

    @pl.when(picked > k)
    def _keep_best() -> None:
        _select(part, at, jnp.where(picked <= at.room, picked, 0), jnp.int32(k))

    here = tuple(lax.axis_index(name) for name in ("b", "kv", "part"))
    keys_ref[here] = load(at.keys.at[pl.ds(0, k)])
    slots_ref[here] = load(at.slots.at[pl.ds(0, k)])
    sizes_ref[here] = lax.broadcast(jnp.minimum(picked, k), (THREADS,))


def _best_of_parts(
    S: int,
    scores_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    keys_ref: Any,
    slots_ref: Any,
    sizes_ref: Any,
    o_ref: Any,
    at: _Buffers,
) -> None:
    """Run one CTA on the candidates of a row's parts, or on the row itself if these are too few."""
    b, kv = lax.axis_index("b"), lax.axis_index("kv")
    row = _Row.of(S, scores_ref, begin_ref, end_ref)
    wanted = jnp.minimum(row.size, o_ref.shape[-1])
    sizes = [sizes_ref[b, kv, part, 0] for part in range(sizes_ref.shape[2])]
    held = functools.reduce(lax.add, sizes)
    held = jnp.where(held >= wanted, held, 0)
    _hold(at, held, keys_ref.at[b, kv], slots_ref.at[b, kv], sizes)
    _select(row, at, held, wanted)
    _put_out(o_ref, at, wanted, S)


def _hold(at: _Buffers, held: Array, keys_ref: Any, slots_ref: Any, sizes: list[Array]) -> None:
    """Load the candidates of a row's parts [parts, k], `sizes` of each, one part after another."""
    parts, k = keys_ref.shape

    @pl.loop(0, _blocks(held, BLOCK))
    def _(step: Array) -> None:
        block = pl.ds(pl.multiple_of(step * BLOCK, BLOCK), BLOCK)
        index = iota(BLOCK) + step * BLOCK
        source, before = index, jnp.int32(0)
        for size in sizes[:-1]:
            before += size
            source += jnp.where(index >= before, k - size, 0)
        source = jnp.minimum(source, parts * k - 1)
        at.keys[block] = gather(keys_ref, source)
        at.slots[block] = gather(slots_ref, source)

    plgpu.commit_smem()


def _put_out(o_ref: Any, at: _Buffers, wanted: Array, S: int) -> None:
    k = o_ref.shape[-1]
    slots = jnp.where(iota(k) < wanted, load(at.slots.at[pl.ds(0, k)]), S)
    o_ref[lax.axis_index("b"), lax.axis_index("kv")] = slots


class _Search(NamedTuple):
    """Search for the wanted-th of `size` keys that agree with `low` above its lowest `width` bits."""

    low: Array
    width: Array
    wanted: Array
    size: Array

    @property
    def behind(self) -> Array:
        """First key after them."""
        return self.low + (jnp.uint32(1) << self.width.astype(jnp.uint32))


type _Body[T] = Callable[[Array, Array, T], T]
"""Function of a block's keys and slots, and of the carry from the previous block."""
type _Blocks = Callable[[_Body[Any], Any], Any]
"""Loop that applies a body to blocks one after another."""


def _likely(row: _Row, at: _Buffers, aim: int, thin: int, few: int) -> Array:
    """Return a key that about `aim` keys of the row precede, from one score in `thin`.

    If the row has at most `few` slots, all keys precede the result.
    """
    all_of_them = row.size <= few
    low, width = jnp.where(all_of_them, LAST - np.uint32(1), np.uint32(0)), jnp.where(all_of_them, 0, 32)
    sought = _Search(low, width, jnp.int32(aim // thin), jnp.int32(-1))
    narrower = functools.partial(_narrowed, _of_sample(row, thin), at)
    return lax.while_loop(lambda it: it.width > 32 - 2 * DIGIT, narrower, sought).behind


def _select(row: _Row, at: _Buffers, held: Array, wanted: Array) -> None:
    """Leave the first `wanted` keys and their slots in `at`, from the `held` candidates or (if 0) the row."""
    blocks = functools.partial(_of_held_or_row, row, at)

    def narrower(state: tuple[_Search, Array]) -> tuple[_Search, Array]:
        sought, held = state
        sought = _narrowed(blocks(held), at, sought)
        reached = wanted - sought.wanted + sought.size
        fits = (held == 0) & (reached <= at.room)

        @pl.when(fits)
        def _() -> None:
            _pick(_of_row(row, at), at, sought.behind, None)

        return sought, jnp.where(fits, reached, held)

    def is_open(state):
        return (state[0].width > 0) & (state[0].wanted != state[0].size)

    sought, held = lax.while_loop(
        is_open, narrower, (_Search(*_agreed(at, held), wanted, jnp.int32(-1)), held)
    )
    all_wanted = sought.wanted == sought.size
    limit = jnp.where(all_wanted, sought.behind, sought.low)
    _pick(blocks(held), at, limit, jnp.where(all_wanted, 0, sought.wanted))


def _agreed(at: _Buffers, held: Array) -> tuple[Array, Array]:
    """Return the common prefix of the collected keys, with zeros below, and the number of lower bits."""
    first = at.keys[0]

    def differ(keys: Array, _: Array, found: Array) -> Array:
        return found | jnp.where(keys == LAST, np.uint32(0), keys ^ first)

    # The maximum has the highest bit in which any key differs.
    bits = _of_held(at, held)(differ, jnp.where(iota(PART) < 0, jnp.uint32(1), jnp.uint32(0))).max()
    for distance in (1, 2, 4, 8, 16):
        bits |= bits >> distance
    width = functools.reduce(lax.add, [(bits >> bit & 1).astype(jnp.int32) for bit in range(32)])
    return jnp.where(held > 0, first & ~bits, np.uint32(0)), jnp.where(held > 0, width, 32)


def _narrowed(blocks: _Blocks, at: _Buffers, sought: _Search) -> _Search:
    """Settle one more digit of the search."""
    shift = jnp.maximum(sought.width - DIGIT, 0)
    at.counts[...] = jnp.zeros(BINS, jnp.int32)

    def body(keys: Array, _: Array, carry: tuple[()]) -> tuple[()]:
        add_ones(at.counts, (keys - sought.low) >> shift.astype(jnp.uint32))
        return carry

    blocks(body, ())
    plgpu.commit_smem()
    digit, before, size = _bin_of(at, sought.wanted)
    low = sought.low + (digit.astype(jnp.uint32) << shift.astype(jnp.uint32))
    return _Search(low, shift, sought.wanted - before, size)


def _bin_of(at: _Buffers, wanted: Array) -> tuple[Array, ...]:
    """Return the bin of the wanted-th key, the number of keys in bins before it, and in it."""
    counts = load(at.counts, RUN_OF_BINS)
    before, _ = sums_before(counts, at.sums, RUN_OF_BINS)
    here = (before < wanted) & (before + counts >= wanted)
    return the_one(here, (iota(BINS, RUN_OF_BINS), before, counts), at.sums, RUN_OF_BINS)


def _pick(blocks: _Blocks, at: _Buffers, limit: Array, ties: Array | None) -> Array:
    """Collect keys below `limit` with their slots, in the order of slots, and the first `ties` equal to it.

    The source may be the collected keys themselves, because none moves up. Keys that do not fit are only
    counted.

    Returns:
      The number of keys.
    """

    def body(keys: Array, slots: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        picked, equal = carry
        wanted = keys < limit
        if ties is not None:
            before, total = sums_before(jnp.where(keys == limit, 1, 0), at.sums)
            wanted |= (keys == limit) & (equal + before < ties)
            equal += total
        return append((at.keys, at.slots), wanted, (keys, slots), picked, at.sums), equal

    picked, _ = blocks(body, (jnp.int32(0), jnp.int32(0)))
    plgpu.commit_smem()
    return picked


def _of_held_or_row(row: _Row, at: _Buffers, held: Array) -> _Blocks:
    """Return the blocks of collected keys if there are any, else of the row."""

    def run[T](body: _Body[T], carry: T) -> T:
        of_held, of_row = (functools.partial(of, body) for of in (_of_held(at, held), _of_row(row, at)))
        return lax.cond(held > 0, of_held, of_row, carry)

    return run


def _of_held(at: _Buffers, held: Array) -> _Blocks:
    def run[T](body: _Body[T], carry: T) -> T:
        def step(index: Array, carry: T) -> T:
            part = pl.ds(pl.multiple_of(index * PART, PART), PART)
            keys = jnp.where(iota(PART) < held - index * PART, load(at.keys.at[part]), LAST)
            return body(keys, load(at.slots.at[part]), carry)

        return lax.fori_loop(0, _blocks(held, PART), step, carry)

    return run


def _of_sample(row: _Row, thin: int) -> _Blocks:
    """Return blocks of a sample of one score in `thin`, in runs of four over the whole row."""
    stride = RUN * thin
    first = lax.div(row.begin, jnp.int32(stride)) * stride

    def run[T](body: _Body[T], carry: T) -> T:
        # Four neighbouring threads have a run, so that their loads coalesce.
        e = iota(BLOCK)
        index, place = (e >> 4 & 31) + ((e >> 9) * RUN + (e & 3)) * 32, e >> 2 & 3
        # Vary the place within a stride: periodic scores would be sampled always or never.
        offset = index * stride + (index * 5 & thin - 1) * RUN + place

        def step(block: Array, carry: T) -> T:
            slots = first + block * (BLOCK * thin) + offset
            counts = _are_among(slots, row.begin, row.end)
            scores = gather(row.scores, jnp.where(counts, slots, row.begin))
            return body(jnp.where(counts, _keys(scores), LAST), slots, carry)

        return lax.fori_loop(0, _blocks(row.end - first, BLOCK * thin), step, carry)

    return run


def _of_row(row: _Row, at: _Buffers) -> _Blocks:
    """Return the blocks of the row that contain valid slots."""
    stages = at.scores.shape[0]
    first = lax.div(row.begin, jnp.int32(BLOCK))
    last = jnp.where(row.size > 0, _blocks(row.end, BLOCK), first)
    S = row.scores.shape[0] * LINE

    def start(step: Array) -> Array:
        # The last block is whole as well: it begins within the previous one.
        return jnp.minimum(step * BLOCK, S - BLOCK)

    def fetch(step: Array) -> None:
        slot = lax.rem(step - first, jnp.int32(stages))
        lines = pl.ds(lax.div(start(step), jnp.int32(LINE)), BLOCK // LINE)
        plgpu.copy_gmem_to_smem(row.scores.at[lines], at.scores.at[slot], at.ready.at[slot])

    def run[T](body: _Body[T], carry: T) -> T:
        def next_block(step: Array, carry: T) -> T:
            slot = lax.rem(step - first, jnp.int32(stages))
            plgpu.barrier_wait(at.ready.at[slot])
            scores = load(at.scores.at[slot])

            @pl.when(step + stages < last)
            def _() -> None:
                plgpu.commit_smem()  # All threads have read.
                fetch(step + stages)

            low, here, keys = jnp.maximum(row.begin, step * BLOCK), start(step), _keys(scores)
            slots = iota(BLOCK) + here

            def among():
                return jnp.where(_are_among(slots, low, row.end), keys, LAST)

            all_count = (low <= here) & (here + BLOCK <= row.end)
            return body(lax.cond(all_count, lambda: keys, among), slots, carry)

        @pl.loop(first, jnp.minimum(first + stages, last))
        def _fill(step: Array) -> None:
            fetch(step)

        return lax.fori_loop(first, last, next_block, carry)

    return run


def _keys(scores: Array) -> Array:
    """Return unsigned integers that decrease with the score, and 0 for NaN."""
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    # Keys of positive scores fall as their bits rise, those of negative scores rise; -0 equals 0.
    keys = jnp.where(bits > SIGN, bits, ~bits & ~SIGN)
    return jnp.where(scores != scores, np.uint32(0), keys)


def _are_among(slots: Array, begin: Array, end: Array) -> Array:
    # The difference is unsigned, so that slots below `begin` become very large.
    return (slots - begin).astype(jnp.uint32) < (end - begin).astype(jnp.uint32)


def _blocks(count: Array, size: int) -> Array:
    return lax.div(count + (size - 1), jnp.int32(size))
