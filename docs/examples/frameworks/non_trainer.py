"""A pretrained model under stage 3 without Trainer: zero-launch --as-deepspeed --nproc 2 non_trainer.py MODEL_DIR

`HfDeepSpeedConfig` before `from_pretrained` has every rank hold only its part of the weights.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from corpus import Text, small_gpt2
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
}


def main() -> None:
    folder = sys.argv[1]
    deepspeed.init_distributed()
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    if rank == 0:
        small_gpt2().save_pretrained(folder)
    deepspeed.comm.barrier()
    kept = HfDeepSpeedConfig(CONFIG)  # keep it: Transformers asks it while the model is built
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine, _, _, _ = deepspeed.initialize(model=model, config=kept.config)
    text = Text()
    for step in range(20):
        rows = [text[(step * ranks + rank) * 4 + number]["input_ids"] for number in range(4)]
        batch = torch.stack(rows).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    prompt = torch.tensor([list(b"def ")], device=engine.device)
    with torch.no_grad():
        generated = engine.module.generate(prompt, max_new_tokens=8, do_sample=False, synced_gpus=True)
    if rank == 0:
        print("final loss", loss.item(), "generated", bytes(generated[0].tolist()))


if __name__ == "__main__":
    main()
