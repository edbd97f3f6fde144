"""One training through the name `deepspeed`, whoever answers it: KIND STAGE OFFLOAD FOLDER, prints what it saw as JSON.

KIND: `trainer`, `trainer-ds` (optimizer and schedule from the configuration), `accelerate` (its plugin), `plain`
(deepspeed.initialize) or `pretrained` (HfDeepSpeedConfig and from_pretrained of FOLDER/pretrained); the last two run on
any number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH, STEPS = 128, 16, 30
SIZE = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build() -> GPT2LMHeadModel:
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZE, **STILL))


def zero(stage: int, offload: bool, **more: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage, **more}
    if offload:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            section["offload_param"] = {"device": "cpu"}
    return section


def with_trainer(stage: int, offload: bool, folder: Path, *, from_config: bool) -> dict[str, Any]:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config: dict[str, Any] = {
        **dict.fromkeys(sizes, "auto"),
        "zero_optimization": zero(stage, offload, stage3_gather_16bit_weights_on_model_save=True),
    }
    if from_config:
        adamw = {**dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), "torch_adam": not offload}
        config["optimizer"] = {"type": "AdamW", "params": adamw}
        warmup = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(warmup, "auto")}
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=config,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        weight_decay=0.01,
        logging_steps=1,
        save_strategy="steps",
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=build(), args=arguments, train_dataset=Tokens(64, 0), eval_dataset=Tokens(16, 1))
    resume = folder / f"checkpoint-{STEPS // 2}"
    trainer.train(resume_from_checkpoint=str(resume) if resume.is_dir() else None)
    trainer.save_model()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row.get("grad_norm") for row in rows],
        "rates": [row["learning_rate"] for row in rows],
        "evaluation": trainer.evaluate()["eval_loss"],
    }


def with_accelerate(stage: int, offload: bool, folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin
    from safetensors.torch import save_file
    from torch.utils.data import DataLoader

    where = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu" if stage == 3 else "none"}
    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        zero3_save_16bit_model=True,
        **(where if offload else {}),
    )
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(Tokens(8 * STEPS, 0), batch_size=4), scheduler
    )
    batches = list(loader)
    seen: dict[str, Any] = {"losses": [], "norms": [], "rates": []}

    def train(some: list[Any]) -> list[float]:
        losses = []
        for batch in some:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    seen["norms"].append(None if norm is None else float(norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen["rates"].append(scheduler.get_last_lr()[0])
        return losses

    seen["losses"] += train(batches[:STEPS])
    accelerator.save_state(str(folder / "state"))
    rest = train(batches[STEPS:])
    seen["losses"] += rest
    before = {key: list(values) for key, values in seen.items()}
    whole = {name: tensor.clone().contiguous() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.load_state(str(folder / "state"))
    again = train(batches[STEPS:])
    resumed = accelerator.get_state_dict(model)
    exactly = again == rest and all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    del whole["lm_head.weight"]
    save_file(whole, folder / "model.safetensors")
    return {**before, "resumed exactly": exactly}


def with_engine(stage: int, offload: bool, folder: Path, *, pretrained: bool) -> dict[str, Any]:
    import deepspeed
    from safetensors.torch import save_file
    from transformers.integrations import HfDeepSpeedConfig

    adamw = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, **({} if offload else {"torch_adam": True})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
        "zero_optimization": zero(stage, offload, stage3_param_persistence_threshold=100),
    }
    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    kept = HfDeepSpeedConfig(config) if pretrained else None
    model = GPT2LMHeadModel.from_pretrained(folder / "pretrained") if pretrained else build()
    engine, _, _, _ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    del kept
    rows = torch.randint(0, VOCABULARY, (2 * STEPS, 2 * ranks, LENGTH), generator=torch.Generator().manual_seed(0))
    seen: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for number, row in enumerate(rows):
        mine = row[2 * rank : 2 * rank + 2]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        seen["losses"].append(loss.item())
        if number % 2:
            norm = engine.get_global_grad_norm()
            seen["norms"].append(None if norm is None else float(norm))
            seen["rates"].append(float(engine.get_lr()[0]))
    gathered = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else engine.module.state_dict()
    if rank == 0:
        whole = {name: tensor.clone().contiguous() for name, tensor in gathered.items() if name != "lm_head.weight"}
        save_file(whole, folder / "model.safetensors")
    prompt = rows[0, :1, :4]
    with torch.no_grad():
        made = engine.module.generate(
            prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, synced_gpus=stage == 3 and ranks > 1
        )
    return {**seen, "generated": made.tolist()}


def main() -> None:
    kind, stage, offload, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "offload", Path(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    if kind.startswith("trainer"):
        seen = with_trainer(stage, offload, folder, from_config=kind == "trainer-ds")
    elif kind == "accelerate":
        seen = with_accelerate(stage, offload, folder)
    else:
        seen = with_engine(stage, offload, folder, pretrained=kind == "pretrained")
    if os.environ.get("RANK", "0") == "0":
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
