"""Two more steps of Transformers' Trainer, from the last checkpoint if there is one: CONFIG.json OUTPUT LAST_STEP"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from corpus import Text, small_gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments


class Begin(TrainerCallback):
    """Prints the step at which training begins, on rank 0."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            print(f"begins at step {state.global_step}", flush=True)


config, output, last = sys.argv[1:]
arguments = TrainingArguments(
    output_dir=output,
    deepspeed=config,
    use_cpu=True,
    max_steps=int(last),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    warmup_steps=2,
    logging_steps=1,
    save_steps=2,
    report_to=[],
)
trainer = Trainer(model=small_gpt2(), args=arguments, train_dataset=Text(), callbacks=[Begin()])
trainer.train(resume_from_checkpoint=any(Path(output).glob("checkpoint-*")) or None)
print("final loss", [row["loss"] for row in trainer.state.log_history if "loss" in row][-1], flush=True)
