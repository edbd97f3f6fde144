"""Accelerate with the plugin, offload to the CPU and an optimizer of one's own.

zero-launch --as-deepspeed --nproc 1 accelerate_plugin.py STAGE
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from corpus import Text, small_gpt2
from torch.utils.data import DataLoader

STEPS = 20


def main() -> None:
    stage = int(sys.argv[1])
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        offload_optimizer_device="cpu",
        offload_param_device="cpu",
        zero3_save_16bit_model=True,
    )
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = small_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(Text(), batch_size=8, shuffle=True), scheduler
    )
    for _, batch in zip(range(STEPS), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.print("final loss", loss.item(), type(model).__name__, "tensors", len(weights))


if __name__ == "__main__":
    main()
