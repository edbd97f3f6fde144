"""The whole way, in a few minutes: train a GPT on two ranks, resume on three, export, sample, report.

Arguments that this script does not know go to gpt.py (--layers, --width, --context). `--quick` is the same with a
smaller model and fewer steps, in less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zero_launch import LaunchError, LaunchSpec, launch
from zero_report import make_report

HERE = Path(__file__).resolve().parent
STEPS, QUICK_STEPS = 480, 90
QUICK_SHAPE = ["--layers", "2", "--width", "128", "--context", "64"]
CONSOLE = Console(highlight=False, soft_wrap=True)


def options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file to learn from; default: Python's standard library")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps: less than a minute")
    parser.add_argument("--steps", type=int, help=f"optimizer steps in all (default {STEPS}, {QUICK_STEPS} when quick)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks for the first two thirds (default 2)")
    parser.add_argument("--resume-ranks", type=int, default=3, help="ranks for the rest (default 3)")
    parser.add_argument("--config", type=Path, default=HERE / "ds.json", help="DeepSpeed-style JSON")
    parser.add_argument("--run", type=Path, help="folder for everything that is written (default run/demo-TIME)")
    parser.add_argument("--prompt", help="what the sample continues")
    args, extra = parser.parse_known_args()
    args.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    return args, [*QUICK_SHAPE, *extra] if args.quick else extra


def prepare(args: argparse.Namespace) -> Path:
    """Make the run's folder, with a configuration whose schedule fits the number of steps."""
    if importlib.util.find_spec("safetensors") is None:
        sys.exit("demo: safetensors is not installed: pip install safetensors")
    run: Path = args.run or Path("run") / time.strftime("demo-%Y%m%d-%H%M%S")
    if run.exists() and any(run.iterdir()):
        sys.exit(f"demo: {run} is not empty; give another folder with --run")
    run.mkdir(parents=True, exist_ok=True)
    config = json.loads(args.config.read_text(encoding="utf-8"))
    schedule = config["scheduler"]["params"]
    schedule["total_num_steps"] = args.steps
    schedule["warmup_num_steps"] = min(schedule["warmup_num_steps"], max(2, args.steps // 10))
    (run / "ds.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return run.resolve()


def in_words(ranks: int) -> str:
    return "one rank" if ranks == 1 else f"{ranks} ranks"


def train(run: Path, ranks: int, steps: int, args: argparse.Namespace, extra: list[str]) -> None:
    command = ["--run", str(run), "--config", str(run / "ds.json"), "--steps", str(steps), *extra]
    if args.data is not None:
        command += ["--data", str(args.data.resolve())]
    record = {"ZERO_RUN_RECORD": str(run / "record")}
    launch(LaunchSpec(str(HERE / "gpt.py"), args=tuple(command), nproc=ranks, direct_rank=0, quiet=True, env=record))


def python(*command: str) -> str:
    """Run a program in a fresh process and return what it prints."""
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    return done.stdout


def summarise(run: Path, verdict: str, seconds: float) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ten = max(1, len(rows) // 20)
    first, last = (sum(row["loss"] for row in part) / ten for part in (rows[:ten], rows[-ten:]))
    table = Table.grid(padding=(0, 2))
    for ranks in dict.fromkeys(row["world_size"] for row in rows):
        part = [row for row in rows if row["world_size"] == ranks]
        state = sum(part[-1]["model_state"].values()) / 1e6
        speed = sorted(row["tokens_per_second"] for row in part)[len(part) // 2]
        table.add_row(
            f"steps {part[0]['step']}-{part[-1]['step']}",
            f"{in_words(ranks)}, {state:.0f} MB of model state each, {speed:,.0f} tokens/s",
        )
    table.add_row("loss", f"{first:.2f} → {last:.2f} nats per byte")
    table.add_row("weights", str(run / "gpt.safetensors"))
    table.add_row("report", f"{run / 'record' / 'report.html'}\n{verdict}")
    table.add_row("time", f"{seconds / 60:.1f} minutes")
    CONSOLE.print(Panel(table, title="Done", expand=False))
    before, after = (in_words(ranks) for ranks in (rows[0]["world_size"], rows[-1]["world_size"]))
    CONSOLE.print(
        f"A model sharded over {before} was trained, resumed on {after} from the same checkpoint, exported to one fp32 "
        f"file and sampled with plain torch. Where its time went: {run / 'record' / 'report.html'}"
    )


def main() -> None:
    args, extra = options()
    begin = time.monotonic()
    run = prepare(args)
    weights, record = run / "gpt.safetensors", run / "record"
    try:
        CONSOLE.rule(f"Train on {in_words(args.ranks)}")
        train(run, args.ranks, max(1, args.steps * 2 // 3), args, extra)
        CONSOLE.rule(f"Resume on {in_words(args.resume_ranks)}, from the same checkpoint")
        train(run, args.resume_ranks, args.steps, args, ["--resume", *extra])
        CONSOLE.rule("Export fp32 safetensors")
        python("-m", "zero_ckpt", "convert", str(run / "ckpt"), str(weights))
        CONSOLE.rule("Sample from them in a fresh process, with plain torch")
        prompt = [] if args.prompt is None else ["--prompt", args.prompt]
        CONSOLE.print(Text(python(str(HERE / "sample.py"), str(weights), *prompt)))
        report = make_report(record)
        report.save(record / "report.html")
    except LaunchError as error:
        sys.exit(f"demo: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"demo: {' '.join(error.cmd[1:3])} failed with exit status {error.returncode}; its output is above")
    summarise(run, report.sentence, time.monotonic() - begin)


if __name__ == "__main__":
    main()
