"""Samples per second of Transformers' Trainer: plain, with a DeepSpeed configuration answered here, and with DeepSpeed.

One process, a GPT-2 of 11 million parameters; the variants take turns, each in a fresh process, and every ratio is of
two runs of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import zero_deepspeed

TRAINING = """
import sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

stage, steps, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
config = None
if stage != "plain":
    config = {
        "zero_optimization": {"stage": int(stage)},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            self.begun = time.perf_counter()
        if state.global_step == steps:
            print("rate", (steps - 5) * 8 / (time.perf_counter() - self.begun))


torch.manual_seed(0)
size = GPT2Config(vocab_size=1024, n_positions=128, n_embd=384, n_layer=6, n_head=6)
rows = torch.randint(0, 1024, (8 * steps, 128))
arguments = TrainingArguments(
    output_dir=folder, deepspeed=config, max_steps=steps, per_device_train_batch_size=8, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True,
)
data = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model=GPT2LMHeadModel(size), args=arguments, train_dataset=data, callbacks=[Clock()]).train()
"""


def rate(variant: str, steps: int) -> float:
    """Samples per second of ``plain``, or of a stage ``here`` or with DeepSpeed (``there``)."""
    stage, _, whose = variant.partition(" ")
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    search = [str(zero_deepspeed.path()), *parts] if whose == "here" else parts
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    if whose == "there":  # it looks for MPI without a launcher's variables
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRAINING, stage, str(steps), folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("rate "))


def main() -> None:
    """Print one line per variant: samples per second, and the ratio to plain with its spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--peer", help="a folder to put first on the search path, where DeepSpeed is installed")
    options = parser.parse_args()
    variants = ["plain", "2 here", "3 here"]
    if options.peer:
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), options.peer])
    if options.peer or find_spec("deepspeed") is not None:
        variants += ["2 there", "3 there"]
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(options.rounds):
        for variant in variants:
            rates[variant].append(rate(variant, options.steps))
    for variant, found in rates.items():
        ratios = sorted(mine / plain for mine, plain in zip(found, rates["plain"], strict=True))
        print(
            json.dumps(
                {
                    "trainer": variant,
                    "samples_per_second": round(statistics.median(found), 2),
                    "of_plain": round(statistics.median(ratios), 3),
                    "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
                }
            )
        )


if __name__ == "__main__":
    main()
