"""Accelerate with a DeepSpeed configuration file.

accelerate launch --config_file accelerate_config.yaml accelerate_config_file.py OUTPUT_DIR
"""

from __future__ import annotations

import sys

from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from corpus import Text, small_gpt2
from torch.utils.data import DataLoader

STEPS = 20


def main() -> None:
    accelerator = Accelerator()
    model = small_gpt2()
    optimizer = DummyOptim(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(Text(), batch_size=8, shuffle=True), scheduler
    )
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(sys.argv[1])
    accelerator.print("final loss", loss.item())


if __name__ == "__main__":
    main()
