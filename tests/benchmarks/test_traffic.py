"""Bytes sent for well-known shapes, and all forms of collectives in compiled programs."""

import pytest

from benchmarks.mesh.traffic import hlo_bytes, prefill_bytes
from zdc_jax.config import LayerSpec, ModelConfig
from zdc_jax.plan import CompressionPlan

LLAMA_7B = ModelConfig(
    family="llama",
    layers=LayerSpec().repeated(32),
    norm="rms",
    embed_dim=4096,
    ffn_dim=11008,
    vocab_size=32000,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_positions=131072,
    norm_eps=1e-5,
    activation="silu",
    dtype="bfloat16",
    tie_embeddings=False,
)


def test_dense_ulysses():
    # Each token has four times N H coordinates (q, k, v, o), of which (U-1)/U leave the device.
    sent = prefill_bytes(LLAMA_7B, CompressionPlan.full(LLAMA_7B), length=131072, degree=4)
    assert sent == 32 * 4 * (131072 // 4) * 32 * 128 * 2 * 3 // 4


def test_truncated_exchange_is_a_share_of_dense():
    # The share is (R + Z) / 2H, plus halo, sinks and log-sum-exp.
    dense = prefill_bytes(LLAMA_7B, CompressionPlan.full(LLAMA_7B), length=131072, degree=4)
    bare = CompressionPlan.uniform(LLAMA_7B, qk=32, v=64)
    near = CompressionPlan.uniform(LLAMA_7B, qk=32, v=64, window=512, sinks=4)
    assert prefill_bytes(LLAMA_7B, bare, length=131072, degree=4) == 0.375 * dense
    assert 0.375 * dense < prefill_bytes(LLAMA_7B, near, length=131072, degree=4) <= 0.40 * dense
    float8 = prefill_bytes(LLAMA_7B, near, length=131072, degree=4, payload="float8")
    assert (0.1875 + 8 / 1024) * dense < float8 <= 0.21 * dense


def test_coded_exchange_of_all_coordinates():
    # q and k have 32 coordinates in 6 bits and 96 in 4, v and o all in 4, a byte per block; the halo has 6.
    t, each = 131072 // 4, 2 * (24 + 1 + 48 + 1) + 2 * (64 + 1)
    exchanged = t * 3 // 4 * 32 * (each + 2)
    near = 32 * (256 * 2 * (96 + 1) + 2 * 3 * 4 * 256 * 2 // 4)
    full = CompressionPlan.full(LLAMA_7B)
    sent = prefill_bytes(LLAMA_7B, full, length=131072, degree=4, payload="coded")
    assert sent == 32 * (exchanged + near)
    assert sent < 0.28 * prefill_bytes(LLAMA_7B, full, length=131072, degree=4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%x = (u16[1,8]{1,0}, u16[1,8]{1,0}) all-to-all(%a, %b), replica_groups={{0,1}}, dimensions={0}",
            16,
        ),
        ("%x = u16[4,8]{1,0} all-to-all(%a), replica_groups=[2,4]<=[8], dimensions={0}", 48),
        ("ROOT %x = f32[4,2]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}", 24),
        ("%x = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=[1,4]<=[4]", 24),
        ("%x = f32[8]{0} all-gather-done(%y)", 0),
        ("%x = f32[8]{0} all-reduce(%a), replica_groups=mesh['data'=2,'sequence'=4] {'sequence'}, c=1", 48),
        ("%x = f32[2]{0} reduce-scatter(%a), replica_groups=[1,4]<=[4], dimensions={0}", 24),
        ("%x = bf16[3,5]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,2}}", 30),
        ("%x = (u16[3], u16[3], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1}}", 6),
        ("%x = f32[8]{0} fusion(%all-reduce.1), calls=%y", 0),
    ],
)
def test_collectives(line, expected):
    assert hlo_bytes(line) == expected


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ("((u16[4,8]{1,0}), u16[4,8]{1,0})", "all-to-all", 48),
        ("((u16[8], u16[8]), (u16[8], /*index=1*/u16[8]), u32[], u32[])", "all-to-all", 24),
        ("(f8e4m3fn[2,8]{1,0:S(1)}, f8e4m3fn[8,8]{1,0:S(1)})", "all-gather", 48),
        ("((f32[2]{0}, bf16[1]{0}), (f32[8]{0}, bf16[4]{0}))", "all-gather", 30),
        ("f32[8]{0}", "all-reduce", 48),
        ("(f32[8]{0}, f32[4]{0})", "all-reduce", 72),
        ("((f32[8]{0}), f32[8]{0})", "all-reduce", 48),
        ("((f32[8]{0}), f32[2]{0}, s32[])", "reduce-scatter", 24),
        ("(u16[1,512]{1,0}, u16[1,512]{1,0})", "collective-permute", 1024),
        ("((u16[3]{0}, pred[5]{0}), (u16[3]{0}, pred[5]{0}))", "collective-permute", 11),
    ],
)
def test_asynchronous_collectives_of_gpus(shape, kind, expected):
    started = f"%x = {shape} {kind}-start(u16[4,8]{{1,0}} %bitcast.1), channel_id=1"
    groups = "replica_groups={{0,1,2,3}}, source_target_pairs={{0,1},{1,2}}"
    text = f'{started}, {groups}, backend_config={{"is_sync":false}}'
    assert hlo_bytes(text) == expected
    assert hlo_bytes(f"%y = u16[4,8]{{1,0}} {kind}-done({shape} %x)") == 0


def test_asynchronous_computation():
    # A collective without `-start` counts where its computation is written.
    text = """
%async_computation (p: u16[4,8]) -> u16[4,8] {
  ROOT %all-to-all.1 = u16[4,8]{1,0} all-to-all(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}
ENTRY %main {
  %x = ((u16[4,8]{1,0}), u16[4,8]{1,0}, u32[]) async-start(%a), calls=%async_computation
  ROOT %y = u16[4,8]{1,0} async-done(%x)
}"""
    assert hlo_bytes(text) == 48


def test_the_device_that_sends_most_counts():
    # Device 1 sends 8 + 20 bytes in permutes; all devices send 16 in the all-gather.
    permute = "%x = f32[{}]{{0}} collective-permute(%a), source_target_pairs={}"
    text = [permute.format(2, "{{0,1},{1,2}}"), permute.format(5, "{{1,2}}"), permute.format(4, "{{2,3}}")]
    gather = "%x = f32[8]{0} all-gather(%a), replica_groups=[1,2]<=[2], dimensions={0}"
    assert hlo_bytes("\n".join([*text, gather])) == 28 + 16


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%x = f32[8]{0} all-reduce(%a), replica_groups=@other", "replica groups"),
        ("%x = f32[8]{0} collective-permute(%a), channel_id=1", "cannot read the pairs"),
    ],
)
def test_unknown_groups_are_an_error(line, message):
    with pytest.raises(ValueError, match=message):
        hlo_bytes(line)
