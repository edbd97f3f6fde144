"""Models and runs of `Engine.train_batch`, beside the ordinary loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zero_core

MICRO_BATCHES = 3


class Block(nn.Module):
    def __init__(self, drop: float = 0.0, normed: bool = False) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(12) if normed else nn.LayerNorm(12)
        self.wide, self.narrow, self.drop = nn.Linear(12, 40), nn.Linear(40, 12), nn.Dropout(drop)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.drop(self.narrow(F.gelu(self.wide(normed)))) * scale


class Net(nn.Module):
    """Residual blocks over an embedding; code between the blocks computes too."""

    def __init__(self, drop: float = 0.0, normed: bool = False, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 12)
        self.blocks = nn.ModuleList(Block(drop, normed) for _ in range(3))
        self.head = nn.Linear(12, 30, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        scale = hidden.square().mean().sigmoid()  # every block's argument, from the first one's output
        for block in self.blocks:
            hidden = hidden + block(hidden, scale=scale)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


class Shared(nn.Module):
    """One block that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(30, 12), Block(), nn.Linear(12, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for _ in range(3):
            hidden = hidden + self.block(hidden, torch.ones(()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def llama(**more: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
        return LlamaForCausalLM(LlamaConfig(vocab_size=30, use_cache=False, **sizes, **more))

    return build


def checkpointed_llama() -> nn.Module:
    model = llama()()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama()(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))  # type: ignore[arg-type]


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=30, use_cache=False, decoder_start_token_id=0, **sizes))


def experts() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    more = {"num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=30, use_cache=False, **sizes, **more))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "normed": lambda: Net(normed=True),
    "tied": lambda: Net(tied=True),
    "frozen": lambda: Net(frozen=True),
    "shared": Shared,
    "llama": llama(),
    "tied llama": llama(tie_word_embeddings=True),
    "checkpointed llama": checkpointed_llama,
    "lora": lora,
    "experts": experts,
}


class Case(NamedTuple):
    model: str
    dtype: str = "fp32"
    tier: str = "none"
    stage: int = 3
    inputs: str = "none"  # the tier of what autograd saves
    overlap: str = "off"


def config(case: Case, folder: str, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0}
    if case.tier != "none":
        place = {"device": case.tier, **({"nvme_path": folder} if case.tier == "nvme" else {})}
        zero["offload_optimizer"] = {**place, "overlap": case.overlap}
        if case.stage == 3:
            zero["offload_param"] = place
    dtypes = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20}}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.5,
        "steps_per_print": 0,
        "zero_optimization": zero,
        "offload": {"activations": {"device": case.inputs, "nvme_path": folder}} if case.inputs != "none" else {},
        **dtypes.get(case.dtype, {}),
        **more,
    }


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return [torch.randint(0, 30, (2, 5), generator=generator) for _ in range(MICRO_BATCHES)]


def arguments(model: nn.Module, ids: torch.Tensor) -> Any:
    return {"input_ids": ids, "labels": ids} if hasattr(model, "config") else ids


def facts(engine: Any) -> dict[str, bytes]:
    found = dict(engine.module.named_buffers())
    for name, p in engine.module.named_parameters():
        found[name] = engine.full_param(p)
        held = engine.partition.find(p)
        if held is not None and held[0].plan.trainable:
            found |= {f"{name}/{key}": engine.full_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
    return {
        name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in found.items()
    }


def trained(case: Case, folder: str, unit_by_unit: bool) -> tuple[list[float], dict[str, bytes], float, int]:
    model = MODELS[case.model]()
    engine = zero_core.initialize(model=model, config=config(case, folder))[0]
    losses = []
    for step in range(3):
        given = [arguments(model, ids) for ids in batches(step)]
        if unit_by_unit:
            losses.append(float(engine.train_batch(given)))
            continue
        total = torch.zeros(())
        for one in given:
            output = engine(**one) if isinstance(one, dict) else engine(one)
            total = total + engine.backward(output["loss"] if isinstance(one, dict) else output)
            engine.step()
        losses.append(float(total))
    found = losses, facts(engine), engine.get_global_grad_norm(), engine.skipped_steps
    engine.destroy(unshard=False)
    return found
