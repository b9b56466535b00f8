"""Writes `golden/smollm2.npz`: what transformers says of a real GGUF file, for machines without torch.

python tests/make_golden_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf CORPUS_FOLDER

Windows are of held-out text, one a topic. Their ids are those of transformers' own tokenizer, and are kept:
both sides see the same.
"""

import lzma
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT = Path(__file__).parent / "golden" / "smollm2.npz"
PROMPT = "Gravity is the force that"
NEW, WINDOWS, CONTEXT = 40, 12, 1024


@torch.no_grad()
def main(model_path: Path, corpus: Path) -> None:
    """Computes greedy tokens and the mean loss of each window, in float32."""
    where = {"pretrained_model_name_or_path": model_path.parent, "gguf_file": model_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    greedy = model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    windows, losses = [], []
    for path in sorted(corpus.glob("*/heldout.txt.xz"))[:WINDOWS]:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            ids = tokenizer(file.read(16 * CONTEXT), return_tensors="pt").input_ids[:, :CONTEXT]
        assert ids.shape == (1, CONTEXT), path
        logits = model(ids).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
        windows.append(ids[0].numpy().astype(np.int32))
        print(path.parent.name, losses[-1], flush=True)
    tokens = greedy[0, prompt.shape[1] :].numpy().astype(np.int32)
    np.savez_compressed(OUTPUT, prompt=prompt[0].numpy(), greedy=tokens, windows=windows, losses=losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
