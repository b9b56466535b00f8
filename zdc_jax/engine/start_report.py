"""Log of what an engine is about to serve, written before its programs are compiled."""

import logging
from collections import Counter

import jax

from zdc_jax.cache.kv_cache import device_bytes
from zdc_jax.engine.layout import Layout
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

logger = logging.getLogger("zdc_jax.engine")


def report_start(network: Transformer, layout: Layout, max_model_len: int) -> None:
    """Log devices, dtype, plan, bytes of a cached token, and tokens that fit."""
    mesh = network.mesh
    devices = jax.local_devices()[:1] if mesh is None else mesh.devices.flat
    kinds = Counter(device.device_kind for device in devices)
    logger.info(
        "device: %s; dtype: %s; plan: %s",
        ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        network.dtype.name,
        _describe_plan(network, max_model_len),
    )
    logger.info(
        "cache%s: %s bytes per token, room for %s tokens (%s MB), requests of up to %s tokens, %d at once",
        "" if mesh is None else " of each device",
        f"{layout.bytes_per_token:,}",
        f"{layout.tokens:,}",
        f"{device_bytes(layout.specs, layout.capacity, layout.rows) / 1e6:,.1f}",
        f"{max_model_len:,}",
        layout.rows,
    )


def _describe_plan(network: Transformer, tokens: int) -> str:
    """Return the method of a plan, and its share of a 16-bit cache."""
    plan, full = network.plan, CompressionPlan.full(network.config)
    share = plan.bytes(tokens) / full.bytes(tokens)
    return f"method {plan.method}, {share:.1%} of a 16-bit cache's bytes at {tokens:,} tokens"
