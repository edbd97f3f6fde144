"""One training through the name `deepspeed`, over ranks that share sequences: KIND STAGE FOLDER, prints JSON.

KIND: `trainer` and `accelerate` (with a `parallelism_config`), `registered` (DeepSpeed's names by hand: the attention
is registered before there is a model), or `alone`, plain torch in one process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

WORDS, LENGTH, STEPS, BATCH, LR, CLIP = 61, 16, 4, 2, 1e-2, 1.0
SHAPE = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples whose labels are ignored in part; the first ranks of a sequence have fewer valid tokens."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(3, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        labels = self.rows[number].clone()
        labels[: 3 * (number % 4)] = -100
        return {"input_ids": self.rows[number], "labels": labels}


def build() -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, attn_implementation="sdpa"))


def settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": CLIP, "zero_optimization": zero}


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)


def alone() -> dict[str, Any]:
    """Each batch twice, as the loaders of two ranks that Accelerate does not tell apart give it."""
    model, seen = build().train(), []
    optimizer = adamw(model)
    for batch in DataLoader(Tokens(BATCH * STEPS), BATCH):
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return {"losses": seen, "evaluation": evaluate(model)}


def evaluate(model: Any) -> float:
    """The loss of a full batch in eval mode, on every rank by itself."""
    model.eval()
    with torch.no_grad():
        return float(model(**next(iter(DataLoader(Tokens(BATCH), BATCH)))).loss)


def shared_loss(loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of all ranks, as DeepSpeed's users write it."""
    import torch.distributed.nn.functional as collectives
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    counts = torch.stack(collectives.all_gather((labels != -100).sum(), group=group))
    losses = torch.stack(collectives.all_gather(loss, group=group))
    return torch.where(counts > 0, losses, 0.0).mul(counts).sum() / counts.sum().clamp(min=1)


def parallelism() -> Any:
    from accelerate.utils import ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)


def with_trainer(stage: int, folder: str) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    seen: list[float] = []

    class Listening(Trainer):  # type: ignore[misc]
        """Keeps losses; Trainer's log would gather them over one rank, as Accelerate counts without an accelerator."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            seen.append(loss.item())
            return loss

    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed={**settings(stage), "train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
        parallelism_config=parallelism(),
        max_steps=2 * STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Listening(model=build(), args=arguments, train_dataset=Tokens(BATCH * STEPS))
    trainer.train()
    return {"losses": seen, "evaluation": evaluate(trainer.model)}


def with_accelerate(stage: int) -> dict[str, Any]:
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config={**settings(stage), "train_batch_size": "auto"})
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism())
    model = build()
    loader = DataLoader(Tokens(BATCH * STEPS), BATCH)
    engine, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    seen = []
    for batch in loader:
        labels = batch["shift_labels"]
        loss = shared_loss(engine(**batch, labels=labels).loss, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return {"losses": seen, "evaluation": evaluate(engine)}


def registered(stage: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="some/model",
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=BATCH,
        seq_length=LENGTH,
        seq_length_is_variable=False,
        disable_in_eval=True,
    )
    model = build()
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings(stage), mpu=mpu)[0]
    assert engine.sequence_parallel_size == 2 and engine.dp_world_size == 1 and engine.seq_dp_world_size == 2
    assert engine.seq_parallel_group is mpu.get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(
        DataLoader(Tokens(BATCH * STEPS), BATCH),
        sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=engine.seq_parallel_group,
        sp_world_size=mpu.get_sequence_parallel_world_size(),
        device=engine.device,
    )
    assert len(loader) == 2 * STEPS
    seen = []
    for batch in loader:
        labels = batch["shift_labels"]
        loss = shared_loss(engine(**batch, labels=labels).loss, labels)
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return {"losses": seen, "evaluation": evaluate(engine)}


def main(kind: str, stage: int, folder: str) -> None:
    if kind == "trainer":
        found = with_trainer(stage, folder)
    elif kind == "accelerate":
        found = with_accelerate(stage)
    else:
        found = registered(stage) if kind == "registered" else alone()
    if kind == "alone" or torch.distributed.get_rank() == 0:
        print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
