"""Steps of stage 3 and of ZeRO++ between two nodes whose wire carries one gigabit per second.

    python tests-integration/bench_two_nodes.py [--rate 1gbit] [--steps 12]

Two network namespaces with two ranks of one thread each; 21 million parameters in bf16, few operations for many
weights. All ways live in the same processes and take their steps in turn; a ratio is taken within each turn, and its
median and quartiles are printed. Needs root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from two_nodes import TwoNodes, why_not

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

NAMES = ("plain", "qwZ", "hpZ", "qgZ", "ZeRO++")


def main() -> int:
    """Print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="what the wire carries in each direction, as tc writes it")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    with TwoNodes(args.rate) as nodes:
        script = Path(__file__).parent / "_sharing_training.py"
        ways = nodes.run(script, "wide", str(args.steps), ",".join(NAMES))["ways"]
    print(f"{'':8}{'MB across':>10}{'step, s':>10}{'x faster':>10}  quartiles    hidden")
    kept = []
    for name in NAMES:
        found = ways[name]
        ratios = [plain / ours for plain, ours in zip(ways["plain"]["seconds"], found["seconds"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:8}{found['kernel'] / 1e6:10.1f}{statistics.median(found['seconds']):10.3f}{middle:10.2f}"
            f"  {low:.2f} - {high:.2f}  {found['hidden']:6.0%}"
        )
        speed = ("1", "") if name == "plain" else (f"{middle:.2f}", f"{low:.2f} - {high:.2f}")
        seconds = f"{statistics.median(found['seconds']):.3f}"
        kept.append(("stage 3" if name == "plain" else name, f"{found['kernel'] / 1e6:.1f}", seconds, *speed))
    save(__file__, "two-nodes", ("", "MB across", "step, s", "times faster", "quartiles"), kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
