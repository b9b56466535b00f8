"""Puts the rows of several runs of `equal_bytes` on one model, each of other cells, into one JSON.

    python -m benchmarks.quality.merge WHOLE.json PART.json …

WHOLE.json may be there already; of a cell that several files hold, the first is kept. All must be judged on
the same material.
"""

import json
import sys
from pathlib import Path

from benchmarks.quality.equal_bytes import SAME, save
from benchmarks.quality.rows import model_of


def main(whole: Path, parts: list[Path]) -> None:
    """Writes `whole`."""
    files = [json.loads(path.read_text()) for path in ([whole] if whole.exists() else []) + parts]

    def same(file):
        return {k: file["config"][k] for k in SAME}

    if any(same(file) != same(files[0]) for file in files):
        sys.exit(f"{[str(path) for path in parts]} are not judged on the same windows and sheets")
    rows, refused = {}, []
    for file in files:
        for row in file["rows"]:
            row["model"] = model_of(whole.stem)
            rows.setdefault((row["context"], row["method"], row["budget"], row["protocol"]), row)
        refused += [reason for reason in file["refused"] if reason not in refused]
    order = sorted(rows, key=lambda key: (key[0], key[1], -(key[2] or 0), key[3]))
    materials = {k: v for file in files for k, v in file["config"]["material"].items()}
    merged = files[0] | {"benchmark": whole.stem, "rows": [rows[key] for key in order], "refused": refused}
    merged["config"] = files[0]["config"] | {"name": whole.stem, "material": materials}
    save(whole, merged)
    print(f"{whole}: {len(order)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(part) for part in sys.argv[2:]])
