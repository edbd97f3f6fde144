"""Write docs/pictures/run.json, from which `tools/pictures.py` draws a step and a checkpoint.

Trains docs/examples/gpt.py for some steps on two ranks at stage 3 and keeps one step of rank 0's record and the list of
what the checkpoint holds. Needs the packages, and a machine with nothing else to do.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from zero_ckpt import open_checkpoint
from zero_launch import LaunchSpec, launch
from zero_report import read_run
from zero_report.record.schema import SpanKind

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "pictures" / "run.json"
RANKS, STEPS, WARM_UP = 2, 40, 8
UNITS = "blocks."
KEPT = {"gather", "compute", "reduce", "forward", "backward", "update"}


def recorded_step(record: Path) -> dict[str, Any]:
    """Return the shortest step of rank 0 after some warm-up: the spans of the blocks and of the phases."""
    rank = read_run(record).attempts[0].first
    block = min(
        (block for step in range(WARM_UP, STEPS) if (block := rank.block(step)) is not None), key=lambda block: block.us
    )
    spans = []
    for span in block.spans:
        kind, name = SpanKind(span.kind).name.lower(), span.name
        unit = name.partition(" ")[0]
        whole = kind in {"forward", "backward", "update"}
        if kind in KEPT and (whole or (unit.startswith(UNITS) and "persistent" not in name)):
            spans.append(
                {
                    "kind": kind,
                    "unit": "" if whole else unit,
                    "begin": span.begin,
                    "us": span.duration,
                    "waited": span.waited,
                }
            )
    return {"spans": spans}


def saved_checkpoint(root: Path) -> dict[str, Any]:
    """Return the tree of files (depth, name, bytes or None), bytes of each kind in each rank's file, and the slices of
    the first block's matrices as (rank, elements)."""
    checkpoint = open_checkpoint(root)
    tree: list[tuple[int, str, int | None]] = [(0, "run/ckpt/", None)]
    tree += [(1, path.name, path.stat().st_size) for path in sorted(root.iterdir()) if path.is_file()]
    tree.append((1, f"{checkpoint.path.name}/", None))
    tree += [(2, path.name, path.stat().st_size) for path in sorted(checkpoint.path.iterdir())]
    kinds: list[dict[str, int]] = [{} for _ in range(RANKS)]
    slices = {}
    for entry in checkpoint.manifest.tensors:
        itemsize = 2 if entry.dtype == "BF16" else 4
        for part in entry.slices:
            held = kinds[part.file]
            held[entry.kind] = held.get(entry.kind, 0) + itemsize * part.length
        if entry.kind == "exp_avg" and len(entry.shape) == 2 and entry.name.startswith(f"{UNITS}0."):
            slices[entry.name] = [(part.file, part.length) for part in entry.slices]
    return {"tree": tree, "kinds": kinds, "slices": slices}


def main() -> None:
    """Train, and write what the pictures are drawn from."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        size = ("--layers", "4", "--width", "256", "--context", "64")
        launch(
            LaunchSpec(
                str(ROOT / "docs" / "examples" / "gpt.py"),
                args=("--run", str(run), "--steps", str(STEPS), *size),
                nproc=RANKS,
                env={"ZERO_RUN_RECORD": str(run / "record")},
            )
        )
        found = {
            "run": {"stage": 3, "ranks": RANKS},
            "step": recorded_step(run / "record"),
            "checkpoint": saved_checkpoint(run / "ckpt"),
        }
    TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
