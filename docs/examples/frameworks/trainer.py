"""Transformers' Trainer with a DeepSpeed configuration: trainer.py CONFIG.json OUTPUT_DIR"""

from __future__ import annotations

import sys

from corpus import Text, small_gpt2
from transformers import Trainer, TrainingArguments


def main() -> None:
    config, output = sys.argv[1:]
    arguments = TrainingArguments(
        output_dir=output,
        deepspeed=config,
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=2,
        logging_steps=5,
        save_steps=10,
        report_to=[],
    )
    trainer = Trainer(model=small_gpt2(), args=arguments, train_dataset=Text())
    trainer.train()
    trainer.save_model()
    print("final loss", [row["loss"] for row in trainer.state.log_history if "loss" in row][-1])


if __name__ == "__main__":
    main()
