"""TRL's GRPO with an inference server: URL STAGE ADAPTER FOLDER; every rank prints what it saw as JSON.

Each generation sends the weights of that step to the server and has it continue the prompts. ADAPTER: `lora` or `full`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer
from weight_servers import ask

from zero_comm import WeightSender, WeightServerClient

VOCABULARY, LIKED, STEPS = 24, 7, 4
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def configuration() -> LlamaConfig:
    return LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, tie_word_embeddings=True, **SIZES)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<end>": 1, **{f"w{n}": n for n in range(2, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(text.split().count(f"w{LIKED}")) for text in completions]


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def main(url: str, stage: int, adapter: str, folder: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    set_seed(0)
    arguments = GRPOConfig(
        output_dir=folder,
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        max_steps=STEPS,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        learning_rate=0.05,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    seen: list[Any] = []
    sender: list[WeightSender] = []

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        engine = trainer.model_wrapped
        if not sender:
            sender.append(WeightSender(WeightServerClient(url), ranks=1, is_sender=rank == 0))
        sender[0].send(engine.iter_full_weights(2048))
        full = {name: digest(value) for name, value in engine.full_weights()}
        trainer.accelerator.wait_for_everyone()
        told = ask(url, "digests")
        seen.append({"equal": told["weights"] == full, "updates": told["updates"], "digest": sorted(full.values())})
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        answer = ask(url, "generate", prompts=ids, max_tokens=4, samples=True)
        return {"prompt_ids": ids, "completion_ids": answer["completions"], "logprobs": None}

    trainer = GRPOTrainer(
        model=LlamaForCausalLM(configuration()),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [f"w{2 + n} w{5 + n}" for n in range(8)]}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(target_modules="all-linear", r=4) if adapter == "lora" else None,
        rollout_func=rollout,
    )
    trainer.train()
    sender[0].close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    Path(folder, f"seen-{rank}.json").write_text(
        json.dumps({"seen": seen, "engine": type(trainer.model_wrapped).__module__, "losses": losses})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
