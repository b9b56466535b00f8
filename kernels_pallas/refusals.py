"""Reasons why a kernel would reject a call, found by its own checks without a launch.

Each function takes the arrays and options that its kernel checks. Only shapes and dtypes matter, so
`jax.ShapeDtypeStruct`s suffice. It returns the message of the kernel's error, or None.
"""

from collections.abc import Callable

import jax

from kernels_pallas import common
from kernels_pallas.common import Shaped
from kernels_pallas.decode.inputs import check_decode
from kernels_pallas.prefill.inputs import check_prefill
from kernels_pallas.quantized.dequantise import check_dequantise
from kernels_pallas.quantized.encode import check_encode
from kernels_pallas.quantized.inputs import check_coded
from kernels_pallas.quantized.put_near import check_put_near
from kernels_pallas.quantized.round_tokens import check_round_tokens
from kernels_pallas.quantized.turn_inputs import check_turn_and_store
from kernels_pallas.rope.post_rope import checked_launch
from kernels_pallas.rope.score_blocks import check_score_blocks
from kernels_pallas.select.inputs import check_largest
from kernels_pallas.select.scan_inputs import check_scan


def _refusal[**P](check: Callable[P, object]) -> Callable[P, str | None]:
    """Turn a check that raises into a function that returns the message."""

    def refusal(*args: P.args, **kwargs: P.kwargs) -> str | None:
        try:
            check(*args, **kwargs)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return None

    return refusal


def _check_here(q: Shaped) -> None:
    if (backend := jax.default_backend()) != "gpu":
        raise NotImplementedError(
            f"it needs a GPU of compute capability 9.0, the default backend is {backend!r}"
        )
    common.check_device()
    common.check_dtypes(q=q)


prefill_refusal = _refusal(check_prefill)
decode_refusal = _refusal(check_decode)
coded_refusal = _refusal(check_coded)
dequantise_refusal = _refusal(check_dequantise)
encode_refusal = _refusal(check_encode)
put_near_refusal = _refusal(check_put_near)
round_tokens_refusal = _refusal(check_round_tokens)
scan_refusal = _refusal(check_scan)
score_blocks_refusal = _refusal(check_score_blocks)
select_refusal = _refusal(check_largest)
post_rope_refusal = _refusal(checked_launch)
turn_and_store_refusal = _refusal(check_turn_and_store)
device_refusal = _refusal(_check_here)
"""Return why no kernel can run here on arrays of q's dtype, or None.

Only this check rejects machines without a GPU: kernels may be lowered there for another machine.
"""
