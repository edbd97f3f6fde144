"""Train a byte-level GPT under ZeRO. Started with: zero-launch --nproc 2 gpt.py --run run/gpt

The model and its loss are plain PyTorch (model.py). What makes this a sharded run is `initialize`, the three calls of
the loop, and the JSON file, which is DeepSpeed's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from display import Display
from model import GPT, Shape, read_text

import zero_core

HERE = Path(__file__).resolve().parent


def batches(text: torch.Tensor, engine: zero_core.Engine, context: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each global batch: random pieces of the text, the same ones whatever the number of ranks."""
    size = engine.train_micro_batch_size_per_gpu()
    while True:
        generator = torch.Generator().manual_seed(engine.micro_steps)
        starts = torch.randint(len(text) - context - 1, (dist.get_world_size(), size), generator=generator)
        pieces = torch.stack([text[start : start + context + 1] for start in starts[dist.get_rank()]])
        pieces = pieces.long().to(engine.device)
        yield pieces[:, :-1], pieces[:, 1:]


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("run/gpt"), help="folder of the checkpoints and the metrics")
    parser.add_argument("--config", default=str(HERE / "ds.json"), help="DeepSpeed-style JSON")
    parser.add_argument("--data", type=Path, help="a file to learn from; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=480, help="train up to this step")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of --run")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--width", type=int, default=Shape.width, help="a multiple of 64")
    parser.add_argument("--context", type=int, default=Shape.context, help="bytes that the model looks back")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = Shape(args.layers, args.width, args.context)
    text = read_text(args.data)
    if len(text) < shape.context + 2:
        parser.error(f"--data: expected at least {shape.context + 2} bytes, got {len(text)}")
    model = GPT(shape)
    engine, _, _, _ = zero_core.initialize(model=model, config=args.config, model_parameters=model.parameters())
    if args.resume:
        engine.load_checkpoint(args.run / "ckpt")

    data = batches(text, engine, shape.context)
    with Display(engine, args.run / "metrics.jsonl", last_step=args.steps) as display:
        while engine.global_steps < args.steps:
            x, y = next(data)
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            display.show(mean_over_ranks(loss), tokens=engine.train_batch_size() * shape.context)
    engine.save_checkpoint(args.run / "ckpt")
    engine.destroy()


if __name__ == "__main__":
    main()
