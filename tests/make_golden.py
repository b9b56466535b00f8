"""Script for `golden/*.npz`: logits of transformers, for machines without torch.

python tests/make_golden.py REFERENCE_MODELS_FOLDER
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from hf_variants import VARIANTS, VOCAB, token_ids, write_variant
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parent / "golden"
REFERENCES = ("ref-llama-23m", "ref-opt-26m")
REFERENCE_POSITIONS = (0, 63, 1000, 2047, 4095)
"""Positions of a 4096-token window whose logits are stored."""


@torch.no_grad()
def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return float32 logits [B, T, V] of transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model(torch.from_numpy(tokens)).logits.numpy()


def main(references: Path) -> None:
    """Compute and write both files."""
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            name: logits(write_variant(name, Path(folder) / name), token_ids(VOCAB, (2, 24)))
            for name in VARIANTS
        }
    np.savez_compressed(GOLDEN / "variants.npz", **variants)
    kept = {
        name: logits(references / name, token_ids(8192, (1, 4096)))[0, REFERENCE_POSITIONS, :]
        for name in REFERENCES
    }
    np.savez_compressed(GOLDEN / "reference.npz", **kept)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
