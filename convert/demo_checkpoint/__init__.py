"""A small real checkpoint in Hugging Face layout that ships with the package; README.md is its model card."""

from pathlib import Path

PATH = Path(__file__).parent
