"""Draw the pictures of the pages: docs/pictures/*.svg.

`python tools/pictures.py` draws them; with `--check` it only compares, and its exit status says the outcome. Run by
`nox -s lint`. Needs zero-plan. The sources:

* architecture: the contract of layers in pyproject.toml, which import-linter holds;
* memory: zero-plan's formulas;
* step and checkpoint: docs/pictures/run.json, which `tools/picture_run.py` writes from a run.

A picture is 400 units wide and its letters are 11 units high, so it can be read in a column of 400 pixels. It has a
background of its own and follows the reader's colour scheme.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import tomllib

from zero_plan import Setup, model_states

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 400
STYLE = """
svg { --back: #ffffff; --text: #1f2328; --dim: #59636e; --line: #d1d9e0; --box: #f3f5f7;
  --a: #3b74c4; --b: #c8701e; --c: #2f8a5b; --d: #8a5cc2; --on: #ffffff }
@media (prefers-color-scheme: dark) {
  svg { --back: #14181d; --text: #e6e9ec; --dim: #9aa4ae; --line: #3a424b; --box: #20262d;
    --a: #6ea1ea; --b: #e3944a; --c: #55b384; --d: #b08ae0; --on: #14181d } }
text { font: 11px system-ui, sans-serif; fill: var(--text) }
.title { font-weight: 600 } .dim { fill: var(--dim) } .on { fill: var(--on) } .mono { font-family: monospace }
.middle { text-anchor: middle } .end { text-anchor: end }
.back { fill: var(--back) } .box { fill: var(--box); stroke: var(--line) } .line { stroke: var(--line) }
.a { fill: var(--a) } .b { fill: var(--b) } .c { fill: var(--c) } .d { fill: var(--d) }
.wait { opacity: 0.4 } .arrow { stroke: var(--dim); fill: none }
"""


class Picture:
    """An SVG of `WIDTH` units that grows downwards. `name`: its file; `description`: what a screen reader says."""

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.height = 0.0
        self._description = description
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write one line; ``y`` is its base line."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>')
        self.height = max(self.height, y + 4)

    def box(self, x: float, y: float, width: float, height: float, style: str, tip: str = "") -> None:
        """Draw a rectangle; ``tip`` is shown under the pointer where the picture is a page of its own."""
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        size = f'width="{max(width, 0.5):.2f}" height="{height:g}"'
        self._parts.append(f'<rect x="{x:.2f}" y="{y:g}" {size} class="{style}">{inside}</rect>')
        self.height = max(self.height, y + height)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "line") -> None:
        """Draw a straight line."""
        self._parts.append(f'<line x1="{x1:.2f}" y1="{y1:g}" x2="{x2:.2f}" y2="{y2:g}" class="{style}"/>')
        self.height = max(self.height, y1, y2)

    def arrow_down(self, x: float, y: float, length: float) -> None:
        """Draw an arrow that ends at ``y + length``."""
        path = f"M{x:g} {y:g}v{length:g}m-4 -4l4 4l4 -4"
        self._parts.append(f'<path d="{path}" class="arrow"/>')

    def key(self, y: float, entries: Iterable[tuple[str, str]], x: float = 10) -> None:
        """Write what colours mean, each as (style, meaning), in one line."""
        for style, meaning in entries:
            self.box(x, y - 9, 10, 10, style)
            self.text(x + 14, y, meaning, "dim")
            x += 28 + 6.4 * len(meaning)

    def svg(self) -> str:
        """Return the file's text."""
        height = self.height + 10
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH * 1.5:g}" '
                f'height="{height * 1.5:g}" role="img">',
                f"<title>{escape(self._description)}</title>",
                f"<style>{STYLE}</style>",
                f'<rect width="{WIDTH}" height="{height:g}" rx="6" class="back"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def size_text(nbytes: float) -> str:
    """Return bytes with a unit of powers of 1024 and three digits."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


# ---------------------------------------------------------------------------------------------------------------------
# Architecture

FLOORS = (
    "DeepSpeed's names, answered",
    "before a run, and beside it",
    "engine, command: where packages are put together",
    "sharding, tiers, checkpoints, optimizers, settings, sequences",
    "import none of the others",
)
"""What each layer of the contract is, from the top."""


def architecture() -> Picture:
    """Draw the layers of packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    picture = Picture("architecture", "The packages in layers: each may import those below it, none beside or above it")
    top = 10.0
    for place, (layer, meaning) in enumerate(zip(layers, FLOORS, strict=True)):
        names = [name.strip().replace("_", "-") for name in layer.split("|")]
        rows = [names[begin : begin + 3] for begin in range(0, len(names), 3)]
        height = 22 + 26 * len(rows)
        if place:
            picture.arrow_down(WIDTH / 2, top - 15, 13)
        picture.box(10, top, WIDTH - 20, height, "box")
        picture.text(18, top + 15, meaning, "dim")
        for number, row in enumerate(rows):
            for column, name in enumerate(row):
                x = 18 + column * 122
                picture.box(x, top + 22 + 26 * number, 118, 20, "a")
                picture.text(x + 59, top + 36 + 26 * number, name, "on middle")
        top += height + 17
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# Memory per stage

PARAMETERS, RANKS = 7_000_000_000, 8
KINDS = {"parameters": "a", "gradients": "b", "masters": "c", "moments": "d"}


def memory() -> Picture:
    """Draw what one rank's device holds of the model state at each stage."""
    picture = Picture(
        "memory", "Bytes of model state that one of 8 ranks holds on its device, by stage, for 7 billion parameters"
    )
    picture.text(10, 20, f"{PARAMETERS / 1e9:g} billion parameters in bf16, AdamW, {RANKS} ranks", "title")
    picture.text(10, 36, "bytes on one rank's device, without activations and gathered units", "dim")
    setups = {f"stage {stage}": Setup(stage=stage, world_size=RANKS) for stage in range(4)}
    setups["+ optimizer offloaded"] = Setup(stage=3, world_size=RANKS, offload_optimizer="nvme")
    setups["+ parameters too"] = Setup(3, RANKS, offload_optimizer="nvme", offload_parameters="nvme")
    rows = {
        name: [row for row in model_states(PARAMETERS, setup) if row.tier == "device"] for name, setup in setups.items()
    }
    most = max(sum(row.nbytes for row in held) for held in rows.values())
    y = 48.0
    for name, held in rows.items():
        picture.text(10, y + 14, name)
        x = 140.0
        for row in held:
            width = row.nbytes / most * 195
            picture.box(x, y, width, 20, KINDS[row.kind], f"{row.kind}: {size_text(row.nbytes)}")
            x += width
        picture.text(x + 5, y + 14, size_text(sum(row.nbytes for row in held)), "dim")
        y += 28
    picture.key(y + 12, ((style, kind) for kind, style in KINDS.items()))
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# One step

SPANS = {"gather": "a", "compute": "c", "reduce": "b"}
PHASES = ("forward", "backward", "update")


def step(run: dict[str, Any]) -> Picture:
    """Draw one recorded step of rank 0: a row for each unit, time to the right."""
    facts, spans = run["run"], run["step"]["spans"]
    start = min(span["begin"] for span in spans)
    whole = max(span["begin"] + span["us"] for span in spans) - start
    picture = Picture(
        "step", "One training step at stage 3 as a timeline: gathers, computation and reductions of each unit"
    )
    picture.text(
        10, 20, f"One step of rank 0 of {facts['ranks']} at stage {facts['stage']}; time runs to the right", "title"
    )
    left, right = 62.0, WIDTH - 10.0

    def place(us: float) -> float:
        return left + (us - start) / whole * (right - left)

    units = list(dict.fromkeys(span["unit"] for span in spans if span["kind"] in SPANS))
    top, bottom = 52.0, 52.0 + 34 * len(units)
    for span in spans:
        if span["kind"] in PHASES:
            x = place(span["begin"])
            picture.line(x, 28, x, bottom)
            picture.text(min(x + 3, right - 38), 40, span["kind"], "dim")
    for number, unit in enumerate(units):
        y = top + 34 * number
        picture.text(10, y + 17, unit)
        picture.line(left, y + 31, right, y + 31)
        for span in (span for span in spans if span["unit"] == unit and span["kind"] in SPANS):
            travels = span["kind"] != "compute"
            begin, end = span["begin"], span["begin"] + span["us"]
            height, shift = (10, 16) if travels else (12, 2)
            tip = f"{span['kind']}: {span['us'] / 1000:.1f} ms, waited {span['waited'] / 1000:.1f} ms"
            style = SPANS[span["kind"]]
            picture.box(
                place(begin), y + shift, place(end) - place(begin), height, f"{style} wait" if travels else style, tip
            )
            if travels:
                picture.box(
                    place(end - span["waited"]), y + shift, span["waited"] / whole * (right - left), height, style
                )
    picture.key(bottom + 16, ((style, kind) for kind, style in SPANS.items()))
    picture.text(10, bottom + 34, "pale: under way while the rank computes; full: the rank waits for it", "dim")
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint

STORED = {"param": "a", "master": "c", "exp_avg": "d", "exp_avg_sq": "b"}


def checkpoint(run: dict[str, Any]) -> Picture:
    """Draw the files of one checkpoint, what is in each, and the slices of some tensors."""
    saved, ranks = run["checkpoint"], run["run"]["ranks"]
    picture = Picture(
        "checkpoint", "The files of a checkpoint of two ranks, the kinds of data in each, and how tensors are sliced"
    )
    picture.text(10, 20, f"A checkpoint of {ranks} ranks", "title")
    y = 38.0
    for depth, name, nbytes in saved["tree"]:
        picture.text(10 + 14 * depth, y, name, "mono")
        picture.text(WIDTH - 10, y, "" if nbytes is None else size_text(nbytes), "dim end")
        y += 15
    y += 14
    picture.text(10, y, "What is in each file", "title")
    most = max(sum(held.values()) for held in saved["kinds"])
    for rank, held in enumerate(saved["kinds"]):
        x = 62.0
        picture.text(10, y + 20, f"rank {rank}")
        for kind, style in STORED.items():
            width = held[kind] / most * (WIDTH - 10 - 62)
            picture.box(x, y + 8, width, 16, style, f"{kind}: {size_text(held[kind])}")
            x += width
        y += 24
    y += 22
    picture.key(y, ((style, kind) for kind, style in STORED.items()))
    y += 26
    picture.text(10, y, "Slices of one unit's tensors, by the file that holds them", "title")
    for name, slices in saved["slices"].items():
        numel = sum(length for _, length in slices)
        picture.text(10, y + 20, name, "mono")
        x = 150.0
        for rank, length in slices:
            width = length / numel * (WIDTH - 10 - 150)
            picture.box(x, y + 8, width, 16, ("a", "box")[rank % 2], f"elements {length:,} of {numel:,}")
            if width > 50:
                picture.text(x + width / 2, y + 20, f"rank {rank}", ("on middle", "middle")[rank % 2])
            x += width
        y += 24
    return picture


def main() -> int:
    """Draw the pictures, or with `--check` compare them; return the exit status."""
    run = json.loads((FOLDER / "run.json").read_text(encoding="utf-8"))
    draw: list[Callable[[], Picture]] = [architecture, memory, lambda: step(run), lambda: checkpoint(run)]
    stale = []
    for picture in (each() for each in draw):
        path = FOLDER / f"{picture.name}.svg"
        if "--check" not in sys.argv[1:]:
            path.write_text(picture.svg(), encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != picture.svg():
            stale.append(str(path.relative_to(ROOT)))
    for name in stale:
        print(f"{name} is not what tools/pictures.py draws; run `python tools/pictures.py`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
