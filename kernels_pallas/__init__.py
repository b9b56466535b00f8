"""GPU kernels on plain arrays; `reference` holds the plain semantics that every implementation must meet."""

from kernels_pallas.coded_decode import coded_attention as coded_attention
from kernels_pallas.coded_inputs import CodedConfig as CodedConfig
from kernels_pallas.coded_inputs import Plane as Plane
from kernels_pallas.decode import decode_attention as decode_attention
from kernels_pallas.decode_inputs import DecodeConfig as DecodeConfig
from kernels_pallas.decode_inputs import Ring as Ring
from kernels_pallas.post_rope import TILE_TOKENS as TILE_TOKENS
from kernels_pallas.post_rope import PostRopeConfig as PostRopeConfig
from kernels_pallas.post_rope import post_rope as post_rope
from kernels_pallas.prefill import PrefillConfig as PrefillConfig
from kernels_pallas.prefill import prefill_attention as prefill_attention
from kernels_pallas.prefill_inputs import TAIL_ALIGNMENT as TAIL_ALIGNMENT
from kernels_pallas.prefill_inputs import Trailing as Trailing
from kernels_pallas.reference import attention_reference as attention_reference
from kernels_pallas.refusals import coded_refusal as coded_refusal
from kernels_pallas.refusals import decode_refusal as decode_refusal
from kernels_pallas.refusals import device_refusal as device_refusal
from kernels_pallas.refusals import post_rope_refusal as post_rope_refusal
from kernels_pallas.refusals import prefill_refusal as prefill_refusal
from kernels_pallas.refusals import segment_refusal as segment_refusal
from kernels_pallas.segments import Segment as Segment
from kernels_pallas.segments import merge_partial as merge_partial
from kernels_pallas.segments import segment_attention as segment_attention
