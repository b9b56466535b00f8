"""Script for `golden/smollm2.npz`: results of transformers for a real GGUF file, for machines without torch.

python tests/make_golden_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf CORPUS_FOLDER

Windows are held-out text, one per topic. The file stores their ids, so that both sides see the same, and the
hash of all ids of a megabyte of text.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from gguf_files import texts
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT = Path(__file__).parent / "golden" / "smollm2.npz"
PROMPT = "Gravity is the force that"
NEW, WINDOWS, CONTEXT = 40, 12, 1024


@torch.no_grad()
def main(model_path: Path, corpus: Path) -> None:
    """Compute greedy tokens and the mean loss of each window, in float32."""
    where = {"pretrained_model_name_or_path": model_path.parent, "gguf_file": model_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    # transformers (5.17) ignores tokenizer.ggml.pre; SmolLM's own tokenizer splits each digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = np.concatenate([tokenizer(text).input_ids for text in texts(corpus)]).astype(np.int32)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    greedy = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    windows, losses = [], []
    for text in texts(corpus)[:WINDOWS]:
        window = tokenizer(text, return_tensors="pt").input_ids[:, :CONTEXT]
        assert window.shape == (1, CONTEXT)
        logits = model(window).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:]).item())
        windows.append(window[0].numpy().astype(np.int32))
    np.savez_compressed(
        OUTPUT,
        prompt=prompt[0].numpy(),
        greedy=greedy[0, prompt.shape[1] :].numpy().astype(np.int32),
        windows=windows,
        losses=losses,
        num_ids=len(ids),
        ids_hash=hashlib.sha256(ids.tobytes()).hexdigest(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
