"""Reports on adapters, experts and several models, reproduced here; docs/public-threads.md names the threads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_frameworks import run
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from zero_comm import run_ranks
from zero_deepspeed.construction import GatheredParameters, Init
from zero_deepspeed.initialization import initialize

SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16}
EXPERTS = {
    **DENSE,
    "experts_implementation": "eager",
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 1,
}
STEPS, LR = 3, 1e-2


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1, **zero},
    }


def words(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 48, (1, 12), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def plain_steps(model: nn.Module, ranks: int) -> dict[str, torch.Tensor]:
    """The trained weights after training in one process that has the samples of all ranks."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LR)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(**words(step, rank)).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(engine: Any) -> None:
    for step in range(STEPS):
        engine.backward(engine(**words(step, dist.get_rank())).loss)
        engine.step()


def distance(engine: Any, expected: dict[str, torch.Tensor]) -> float:
    named = dict(engine.module.named_parameters())
    assert named.keys() == expected.keys()
    return max(float((engine.full_param(p) - expected[name]).abs().max()) for name, p in named.items())


def qwen(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**DENSE)).double()


def with_adapters(model: nn.Module, **targets: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    chosen_modules = targets or {"target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **chosen_modules))


def checkpointed_adapters(persistent: int) -> tuple[float, int, set[str]]:
    """(distance from one process without checkpointing, bytes gathered after a step, statuses of frozen weights)"""
    expected = plain_steps(with_adapters(qwen()).double(), 2)
    model = with_adapters(qwen()).double()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LR)
    engine = initialize(
        model=model, optimizer=optimizer, config=settings(3, stage3_param_persistence_threshold=persistent)
    )[0]
    train(engine)
    frozen = [p for p in model.parameters() if not p.requires_grad and p.numel() > max(persistent, 1)]
    found = engine.memory_report()["gathered parameters"], {p.ds_status.name for p in frozen}
    apart = distance(engine, expected)
    engine.destroy()
    return apart, *found


@pytest.mark.parametrize("persistent", [0, 40])
def test_adapters_with_checkpointing_that_is_not_reentrant_train_at_stage_3(persistent: int) -> None:
    pytest.importorskip("peft")
    for apart, gathered, statuses in run_ranks(checkpointed_adapters, 2, persistent):
        assert apart < 1e-12
        assert statuses == {"NOT_AVAILABLE"}
        assert gathered == 0 or persistent


def mixture(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).double()


def chosen(model: Any, sample: dict[str, torch.Tensor]) -> list[set[int]]:
    """The experts that a sample uses, by layer."""
    logits = model(**sample, output_router_logits=True).router_logits
    return [set(layer.argmax(-1).tolist()) for layer in logits]


def random_experts(stage: int) -> tuple[float, bool]:
    model = mixture()
    differ = any(chosen(model, words(s, 0)) != chosen(model, words(s, 1)) for s in range(STEPS))
    expected = plain_steps(mixture(), 2)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    engine = initialize(model=model, optimizer=optimizer, config=settings(stage))[0]
    train(engine)
    apart = distance(engine, expected)
    engine.destroy()
    return apart, differ


@pytest.mark.parametrize("stage", [2, 3])
def test_qwen_moe_trains_where_ranks_choose_different_experts(stage: int) -> None:
    for apart, differ in run_ranks(random_experts, 2, stage):
        assert differ and apart < 1e-12


TARGETS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def expert_adapters() -> tuple[float, bool]:
    expected = plain_steps(with_adapters(mixture().float(), **TARGETS).double(), 2)
    config = settings(3)
    torch.manual_seed(0)
    with Init(config_dict_or_path=config):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))
    released = all(p.ds_status.name == "NOT_AVAILABLE" for n, p in model.named_parameters() if "experts" in n)
    adapted = with_adapters(model, **TARGETS)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], LR)
    engine = initialize(model=adapted, optimizer=optimizer, config=config)[0]
    train(engine)
    apart = distance(engine, expected)
    engine.destroy()
    return apart, released


def test_adapters_on_packed_experts_are_made_of_a_model_that_is_sharded_already() -> None:
    pytest.importorskip("peft")
    for apart, released in run_ranks(expert_adapters, 2):
        assert released and apart < 1e-6  # drawn in float32, and trained in float64


def gathered_in_between() -> tuple[float, bool]:
    """Gather all weights, as for a server, after a forward pass that no backward pass follows, and after a save."""
    expected = plain_steps(qwen(), 2)
    model = qwen()
    engine = initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), LR), config=settings(3))[0]
    same = True
    for step in range(STEPS):
        sample = words(step, dist.get_rank())
        engine(**sample)  # its loss is dropped
        with torch.no_grad():
            engine(**sample)
        before = [engine.full_param(p).clone() for p in model.parameters()]
        with GatheredParameters(list(model.parameters())):
            same &= all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
        for p in model.parameters():
            with GatheredParameters([p]):
                same &= not bool(p.isnan().any())
        engine.backward(engine(**sample).loss)
        engine.step()
    apart = distance(engine, expected)
    engine.destroy()
    return apart, same


def test_weights_are_gathered_for_a_server_whatever_passes_came_before() -> None:
    for apart, same in run_ranks(gathered_in_between, 2):
        assert same and apart < 1e-12


def llama(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**DENSE)).double()


def distilled(student: Any, teacher: Any, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = {"input_ids": sample["input_ids"]}
    with torch.no_grad():
        wanted = teacher(**ids).logits
    return (student(**ids).logits - wanted).square().mean()


def two_engines() -> float:
    """A student at stage 2 learns from a teacher at stage 3 that has no optimizer."""
    plain, teacher = llama(0), llama(1)
    optimizer = torch.optim.AdamW(plain.parameters(), LR)
    for step in range(STEPS):
        for rank in range(2):
            (distilled(plain, teacher, words(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = llama(0)
    student = initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), LR), config=settings(2))[0]
    frozen = initialize(model=copy.deepcopy(teacher), config=settings(3))[0]
    for step in range(STEPS):
        student.backward(distilled(student, frozen, words(step, dist.get_rank())))
        student.step()
    apart = distance(student, {name: p.detach() for name, p in plain.named_parameters()})
    apart = max(apart, distance(frozen, {name: p.detach() for name, p in teacher.named_parameters()}))
    frozen.destroy()
    student.destroy()
    return apart


def test_two_models_have_engines_of_different_stages() -> None:
    assert max(run_ranks(two_engines, 2)) < 1e-12


ACCELERATE = """
import os
import torch
os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from torch import nn

def plugin(stage):
    return DeepSpeedPlugin(hf_ds_config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True})

def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

accelerator = Accelerator(deepspeed_plugins={"student": plugin(2), "teacher": plugin(3)})
student, plain, teacher = build(0), build(0), build(1)
optimizer = torch.optim.SGD(student.parameters(), 0.1)
data = torch.utils.data.DataLoader([torch.full((6,), float(i)) for i in range(8)], batch_size=2)
student, optimizer, data = accelerator.prepare(student, optimizer, data)
AcceleratorState().select_deepspeed_plugin("teacher")
taught = accelerator.prepare(build(1))
AcceleratorState().select_deepspeed_plugin("student")
other = torch.optim.SGD(plain.parameters(), 0.1)
for x in data:
    with torch.no_grad():
        wanted = taught(x)
    accelerator.backward((student(x) - wanted).square().mean())
    optimizer.step(); optimizer.zero_grad()
    (plain(x) - teacher(x).detach()).square().mean().backward()
    other.step(); other.zero_grad()
pairs = zip(accelerator.unwrap_model(student).parameters(), plain.parameters())
apart = max(float((a - b).abs().max()) for a, b in pairs)
print("stages", student.zero_optimization_stage(), taught.zero_optimization_stage(), "apart", apart)
assert apart < 1e-6
"""


def test_accelerate_prepares_two_models_by_two_plugins(tmp_path: Path) -> None:
    assert "stages 2 3" in run(tmp_path, "-c", ACCELERATE)
