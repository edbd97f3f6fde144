"""Small models of Transformers over sequence shards under the engine, and the same training in one process."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import zero_core
from zero_sequence import SequenceGroups, SequenceLoader, TiledCausalLoss, Ulysses, sequence_loss, shift_labels, tiled

__import_ahead__ = [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "qwen3")]
WORDS, LENGTH, MICRO, STEPS, LR, CLIP = 31, 16, 2, 3, 1e-2, 0.7
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = ("llama", "gpt2", "qwen3", "bert")
RECOMPUTED = {"use_reentrant": False}


class Run(NamedTuple):
    """A run. ``sequence``: ranks that share a sequence. ``recompute``: activation checkpointing. ``lora``: adapters of
    peft on a frozen base. ``offload``: states and, at stage 3, parameters on the host. ``built_sharded``: by `Init`.
    ``model``: one of `MODELS`; "bert" is a masked encoder, and some of its samples are padded. ``tiled``: loss and
    MLPs in tiles, what checkpointing keeps in files."""

    sequence: int
    stage: int
    recompute: bool = False
    lora: bool = False
    offload: bool = False
    built_sharded: bool = False
    accumulation: int = 1
    model: str = "llama"
    tiled: bool = False


def build(kind: str) -> nn.Module:
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**{**SHAPE, "num_key_value_heads": 1, "head_dim": 8})
        )
    if kind == "bert":
        shape = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
        return transformers.BertForMaskedLM(transformers.BertConfig(**shape, **NO_DROPOUT, pad_token_id=0))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def make(run: Run) -> nn.Module:
    torch.manual_seed(7)
    model = build(run.model).double()
    if run.recompute:
        model.gradient_checkpointing_enable(RECOMPUTED)  # type: ignore[operator]
    if run.lora:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        model.double()
    return model


def samples(run: Run, count: int) -> list[dict[str, torch.Tensor]]:
    """Samples whose labels are ignored in part: some ranks of a sequence have no valid token. Those of an encoder are
    padded in part, and their labels are not to be shifted."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: (5 * number) % LENGTH] = -100
        if run.model == "bert":
            mask = torch.ones_like(ids)
            mask[LENGTH - number % 4 :] = 0
            found.append({"input_ids": ids, "attention_mask": mask, "shift_labels": labels})
        else:
            found.append({"input_ids": ids, "labels": labels})
    return found


def needed(run: Run, data: int) -> int:
    return MICRO * data * run.accumulation * STEPS


def settings(run: Run, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": run.stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    if run.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if run.stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": run.accumulation,
        "sequence_parallel_size": run.sequence,
        "gradient_clipping": CLIP,
        "data_types": {"param_dtype": "fp64"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": zero,
        **more,
    }


def token_losses(model: Any, batch: dict[str, torch.Tensor], *, tiled: bool = False) -> torch.Tensor:
    """The mean loss over the valid tokens of ``batch``; ``tiled``: as the model itself computes it."""
    if tiled:
        return cast("torch.Tensor", model(**batch, labels=batch["shift_labels"]).loss)
    inputs = {key: value for key, value in batch.items() if key != "shift_labels"}
    return cross_entropy(model(**inputs).logits.flatten(0, 1), batch["shift_labels"].flatten())


def one_process(run: Run, data: int, factor: int = 1) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Weights, the losses of the first data group, and gradient norms; with ``factor`` times the mean gradients."""
    model = make(run).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.01)
    rows = samples(run, needed(run, data))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    losses, norms, start = [], [], 0
    for _ in range(STEPS):
        for _ in range(run.accumulation):
            drawn = [rows[number] for number in order[start : start + MICRO * data]]
            start += len(drawn)
            for group in range(data):
                batch = {key: torch.stack([row[key] for row in drawn[group::data]]) for key in drawn[0]}
                if "labels" in batch:
                    batch["shift_labels"] = shift_labels(batch.pop("labels"))
                loss = token_losses(model, batch)
                (loss * factor / data / run.accumulation).backward()
                losses += [float(loss.detach())] if group == 0 else []
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def start(run: Run, groups: SequenceGroups, **more: Any) -> zero_core.Engine:
    with zero_core.Init(settings(run), mpu=groups, enabled=run.built_sharded):
        model = make(run)
    Ulysses(model, groups)
    if run.tiled:
        TiledCausalLoss(model, budget_bytes=3 * WORDS * 16)
        for layer in model.model.layers:
            layer.mlp.forward = partial(tiled, layer.mlp.forward, tiles=3)
    rows = samples(run, needed(run, dist.get_world_size() // run.sequence))
    return zero_core.initialize(model=model, config=settings(run, **more), mpu=groups, training_data=rows)[0]


def steps(
    engine: zero_core.Engine, groups: SequenceGroups, count: int, *, tiled: bool = False
) -> tuple[list[float], list[float]]:
    """Train for ``count`` micro-batches, ``tiled`` as in `Run`; return this rank's losses and the steps' norms."""
    losses, norms = [], []
    batches = iter(SequenceLoader(engine.training_dataloader, groups, source="same"))
    for _ in range(count):
        batch = next(batches)
        loss = sequence_loss(token_losses(engine, batch, tiled=tiled), batch["shift_labels"], groups.sequence)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms += [engine.get_global_grad_norm()] if boundary else []
    return losses, norms


def over_ranks(
    runs: list[Run], folder: str = "", more: dict[str, Any] | None = None, zero: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Train each run; return weights, losses, norms and facts of this rank. ``folder``: for activations in files.
    ``more``: further sections of the configuration, ``zero``: further keys of ``zero_optimization``."""
    answers = []
    for run in runs:
        groups = SequenceGroups.open(run.sequence)
        activations = {"device": "nvme", "nvme_path": folder, "min_bytes": 1}
        sections = {**({"offload": {"activations": activations}} if run.tiled else {}), **(more or {})}
        if zero:
            sections["zero_optimization"] = {**settings(run)["zero_optimization"], **zero}
        engine = start(run, groups, **sections)
        losses, norms = steps(engine, groups, STEPS * run.accumulation, tiled=run.tiled)
        sampler = engine.training_dataloader.data_sampler
        answers.append(
            {
                "weights": {name: engine.full_param(p) for name, p in engine.module.named_parameters()},
                "losses": losses,
                "norms": norms,
                "sizes": (engine.train_batch_size(), engine.global_samples, sampler.rank, sampler.ranks),
                "group": groups.get_data_parallel_rank(),
            }
        )
        engine.destroy()
        groups.close()
    return answers
