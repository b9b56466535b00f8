"""`zdc convert`: a folder that loads, from a Hugging Face folder or a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from rich.console import Console
from tyro.conf import Positional

from convert.cli.flags import show_default
from convert.conversion import VERIFIED_SHAPE, check_torch, convert, verify_against_transformers
from zdc_jax.config import Dtype
from zdc_jax.loading import load


@dataclass
class Convert:
    """Convert a Hugging Face folder (safetensors) or a GGUF file, without torch.

    Attributes:
      source: Folder with config.json, *.safetensors and a tokenizer; or a .gguf file, or any part of a split
        one.
      output: Folder to write. It appears only once it is complete.
      dtype: Dtype to store. float32 stores quantized weights exactly.
      overwrite: Replace an existing output folder, its calibration included.
      verify: Compare logits with transformers after conversion. Needs torch.
    """

    source: Annotated[Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    output: Annotated[Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    dtype: Annotated[Dtype | None, show_default("dtype of the source; bfloat16 if it is quantized")] = None
    overwrite: bool = False
    verify: bool = False

    def run(self, console: Console) -> None:
        if self.verify:
            check_torch()
        checkpoint = convert(self.source, self.output, dtype=self.dtype, overwrite=self.overwrite)
        console.out(f"converted {self.source} -> {self.output} ({checkpoint.fingerprint})")
        if self.verify:
            with jax.default_matmul_precision("highest"):
                # Rotary frequencies may depend on the context, which is as long as the input in transformers.
                positions = min(VERIFIED_SHAPE[1], checkpoint.config.max_positions)
                network = load(self.output, dtype="float32", max_positions=positions).network

                def compute_logits(tokens: np.ndarray) -> np.ndarray:
                    return np.asarray(network(jax.numpy.asarray(tokens)))

                error = verify_against_transformers(
                    self.source, compute_logits, vocab_size=checkpoint.config.vocab_size
                )
            console.print(f"largest difference of logits from transformers: {error:.2e} of the largest logit")
