"""Models of Transformers on two ranks, at stages 0 and 3, built plainly and in parts: a line of JSON each."""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from transformers.integrations import HfDeepSpeedConfig

VOCABULARY, RESIZED, STEPS = 128, 136, 4
WIDE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, **STILL)),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**WIDE, intermediate_size=64, num_key_value_heads=2)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**WIDE, intermediate_size=48, num_key_value_heads=2, num_local_experts=4),
    ),
}


def run(name: str, stage: int, *, in_parts: bool, lora: bool) -> dict[str, Any]:
    kind, config = MODELS[name]
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 0}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": adamw, "zero_optimization": zero}
    kept = HfDeepSpeedConfig(settings) if in_parts else None
    set_seed(3)
    model = kind._from_config(config) if in_parts else kind(config)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    elif in_parts:
        model.resize_token_embeddings(RESIZED)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings, model_parameters=trained)
    rank = deepspeed.comm.get_rank()
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(1, VOCABULARY, (4, 12), generator=generator)[2 * rank : 2 * rank + 2]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        made = engine.module.generate(
            input_ids=batch[:1, :4], max_new_tokens=3 + 2 * rank, do_sample=False, pad_token_id=0, synced_gpus=True
        )
    whole = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=lora)
    engine.destroy()
    del kept
    rows = max(tensor.shape[0] for tensor in whole.values()) if whole is not None else None
    names = sorted(whole) if whole is not None else []
    return {"losses": losses, "generated": list(made.shape), "rows": rows, "names": names}


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for name in MODELS:
        for lora in (False, True) if name == "llama" else (False,):
            seen = {
                "plain": run(name, 0, in_parts=False, lora=lora),
                "stage 3": run(name, 3, in_parts=False, lora=lora),
                "in parts": run(name, 3, in_parts=True, lora=lora),
            }
            if deepspeed.comm.get_rank() == 0:
                print(json.dumps({"model": name, "lora": lora, **seen}), flush=True)


if __name__ == "__main__":
    main()
