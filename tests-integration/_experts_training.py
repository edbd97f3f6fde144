"""Mixtures of experts of current Transformers, by plain torch and by an engine; shared by test and benchmark."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, LENGTH, SEQUENCES, EXPERTS = 32, 8, 2, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}
KINDS = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen2Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8},
}


def build(kind: str, **sizes: Any) -> Any:
    """The same model with random weights wherever it is built; its experts are packed in 3-D parameters."""
    import transformers

    torch.manual_seed(0)
    configuration = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **sizes})
    return getattr(transformers, f"{kind}ForCausalLM")(configuration).train()


class SeparateExperts(nn.Module):
    """Experts that are modules, called as the packed ones of Transformers are."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner, bias=False), nn.SiLU(), nn.Linear(inner, width, bias=False))
            for _ in range(count)
        )

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, self.each[number](hidden[rows]) * weights[rows, place, None])
        return out


def with_adapters(model: nn.Module) -> Any:
    """The model, frozen, with LoRA on its packed experts and its attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return adapted


def tokens(step: int, rank: int) -> torch.Tensor:
    """Sequences of which every rank has its own range of words, so that it is routed to experts of its own."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(VOCABULARY // 4, (SEQUENCES, LENGTH), generator=generator) + rank * VOCABULARY // 4


class Routing:
    """Counts, by layer and expert, the tokens that routers send there on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, list[int]] = {}
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(lambda _, inputs, name=name: self._count(name, inputs))

    def _count(self, name: str, inputs: tuple[Any, ...]) -> None:
        chosen = inputs[1] if inputs[1].dtype is torch.int64 else inputs[2]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        before = self.counts.get(name, [0] * EXPERTS)
        self.counts[name] = [a + b for a, b in zip(before, counts, strict=True)]


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }


def plain(model: nn.Module, steps: int, ranks: int) -> dict[str, torch.Tensor]:
    """The weights after ``steps`` of one process with all ranks' samples."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
    for step in range(steps):
        for rank in range(ranks):
            (model(input_ids=tokens(step, rank), labels=tokens(step, rank)).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(engine: Any, steps: int) -> dict[str, torch.Tensor]:
    """The full weights after ``steps`` on this rank's samples."""
    for step in range(steps):
        mine = tokens(step, dist.get_rank())
        engine.backward(engine(input_ids=mine, labels=mine).loss)
        engine.step()
    return {n: t.clone() for bucket in engine.iter_full_weights(merge_adapters=False) for n, t in bucket}
