"""Train a Llama with the Trainer of Transformers: the path of a configuration full of "auto"."""

import sys

import dry_models
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Tokens(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(dry_models.VOCABULARY, (dry_models.SEQUENCE,))
        return {"input_ids": row, "labels": row}


arguments = TrainingArguments(
    output_dir=sys.argv[2],
    deepspeed=sys.argv[1],
    max_steps=6,
    per_device_train_batch_size=dry_models.BATCH,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=dry_models.VOCABULARY, **WIDTHS))
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
