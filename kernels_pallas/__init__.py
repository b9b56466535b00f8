"""GPU kernels on plain arrays; `reference` holds the plain semantics that every implementation must meet."""

from kernels_pallas.reference import attention_reference as attention_reference
