"""Draw a run's metrics: the loss, and the model state that one rank holds."""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

KINDS = {
    "optimizer states": "optimizer state (fp32 moments)",
    "masters": "master weights (fp32)",
    "gradients": "gradients",
    "parameter shards": "weights (bf16)",
    "gathered parameters": "small weights, whole on every rank",
}
SHADES = ["#1f4e79", "#3a7ca5", "#81a4cd", "#c5d8ec", "#e4e4e4"]
CURVES = ["#c8553d", "#588157", "#7b2d8b"]
SHARDED = ("optimizer states", "masters", "parameter shards")


def draw(metrics: Path, picture: Path) -> None:
    """Read the JSON lines that `Display` wrote and write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    parts = [(ranks, list(part)) for ranks, part in groupby(rows, key=lambda row: row["world_size"])]
    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with pyplot.rc_context({**style, "font.size": 10, "axes.titlelocation": "left", "axes.titleweight": "bold"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), width_ratios=(3, 2), layout="constrained")
        draw_loss(left, rows, parts)
        draw_memory(right, parts)
        figure.savefig(picture, dpi=150)
        pyplot.close(figure)


def draw_loss(axes: Any, rows: list[dict[str, Any]], parts: list[tuple[int, list[dict[str, Any]]]]) -> None:
    """The loss of every step, faint, and its moving mean in one colour per number of ranks."""
    losses = [row["loss"] for row in rows]
    window = max(1, len(losses) // 25)
    smooth = [statistics.fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
    axes.plot([row["step"] for row in rows], losses, color="#bbbbbb", linewidth=0.8)
    begin = 0
    for (ranks, part), colour in zip(parts, CURVES * len(parts), strict=False):
        steps = [row["step"] for row in part]
        label = f"{ranks} rank{'s' if ranks > 1 else ''}" + (", resumed" if begin else "")
        if begin:
            axes.axvline(steps[0], color="#888888", linewidth=1, linestyle=":")
        curve = smooth[begin : begin + len(part)]
        axes.plot(steps, curve, color=colour, linewidth=2.2, label=label)
        begin += len(part)
    axes.set(title="Loss", xlabel="step", ylabel="nats per byte")
    axes.legend(frameon=False, title=f"mean of {window} steps")


def draw_memory(axes: Any, parts: list[tuple[int, list[dict[str, Any]]]]) -> None:
    """What rank 0 holds between steps, by kind, beside what one process would hold."""
    columns = [(ranks, part[-1]["model_state"]) for ranks, part in parts]
    ranks, held = columns[0]
    whole = sum(size * (ranks if kind in SHARDED else 1) for kind, size in held.items()) / 1e6
    bottoms = [0.0] * len(columns)
    places = range(1, len(columns) + 1)
    for (kind, label), shade in zip(KINDS.items(), SHADES, strict=True):
        heights = [held.get(kind, 0) / 1e6 for _, held in columns]
        if max(heights) > 0.005 * whole:
            axes.bar(places, heights, bottom=bottoms, color=shade, width=0.6, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.bar([0], [whole], color="none", edgecolor="#888888", linestyle="--", width=0.6)
    for place, height in zip([0, *places], [whole, *bottoms], strict=True):
        axes.annotate(
            f"{height:.0f} MB", (place, height), (0, 3), textcoords="offset points", ha="center", weight="bold"
        )
    names = ["not sharded", *(f"{ranks} rank{'s' if ranks > 1 else ''}" for ranks, _ in columns)]
    axes.set_xticks([0, *places], names)
    axes.set(title="Model state on each rank", ylabel="MB", ylim=(0, whole * 1.45))
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    args = parser.parse_args()
    draw(args.metrics, args.picture)


if __name__ == "__main__":
    main()
