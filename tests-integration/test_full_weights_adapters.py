"""Full weights of models with PEFT's adapters: bit by bit what merge_and_unload gives, under the base model's names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("peft")
pytest.importorskip("transformers")

import zero_core
from zero_comm import run_ranks

VOCAB, LENGTH = 32, 6


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **sizes, **changes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, **sizes)
    )


def layer_norms() -> Any:
    """A model of which PEFT trains copies of the norms."""
    from peft import LNTuningConfig, get_peft_model

    model = get_peft_model(llama(), LNTuningConfig(target_modules=["input_layernorm", "norm"]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


def adapted(base: nn.Module, *configs: dict[str, Any]) -> Any:
    """``base`` with one adapter for each of ``configs``, all active, none of them at its start of zeros."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, **configs[0]), "first")
    for number, other in enumerate(configs[1:]):
        model.add_adapter(f"other{number}", LoraConfig(r=4, lora_alpha=2, **other))
    if len(configs) > 1:
        model.base_model.set_adapter(["first", *(f"other{n}" for n in range(len(configs) - 1))])
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "some layers": lambda: adapted(llama(), {"target_modules": r".*layers\.1.*(q|down)_proj"}),
    "tied head": lambda: adapted(llama(tie_word_embeddings=True), {"target_modules": ["q_proj", "v_proj"]}),
    "rank-stabilized": lambda: adapted(llama(), {"target_modules": "all-linear", "use_rslora": True}),
    "dora": lambda: adapted(llama(), {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
    "bias": lambda: adapted(llama(attention_bias=True), {"target_modules": ["q_proj"], "lora_bias": True}),
    "embedding": lambda: adapted(llama(), {"target_modules": ["embed_tokens", "k_proj"]}),
    "saved": lambda: adapted(llama(), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "tokens": lambda: adapted(llama(), {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "two": lambda: adapted(llama(), {"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "o_proj"]}),
    "experts": lambda: adapted(
        mixtral(),
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "norms": layer_norms,
    "no adapter": llama,
}


def settings(stage: int, dtype: str) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1}
    chosen = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
    }
    return {**chosen, "bf16": {"enabled": True}} if dtype == "bf16" else chosen


def trained(kind: str, stage: int, dtype: str) -> Any:
    torch.manual_seed(0)
    engine = zero_core.initialize(model=MODELS[kind](), config=settings(stage, dtype))[0]
    tokens = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine


def exported(kind: str, stage: int, dtype: str) -> dict[str, Any]:
    engine = trained(kind, stage, dtype)
    described = engine.full_weights().metadata()
    found = {n: t.clone() for bucket in engine.iter_full_weights(4096) for n, t in bucket}
    apart = {n: t.clone() for bucket in engine.iter_full_weights(merge_adapters=False) for n, t in bucket}
    again = {n: t.clone() for bucket in engine.iter_full_weights() for n, t in bucket}
    torch.manual_seed(0)
    plain = MODELS[kind]().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(apart[name])
    whole = plain.merge_and_unload() if hasattr(plain, "merge_and_unload") else plain
    expected = {name: p.detach() for name, p in whole.named_parameters()}
    return {
        "names": sorted(found) == sorted(expected),
        "described": [(i.name, i.shape) for i in described] == [(n, tuple(t.shape)) for n, t in found.items()],
        "differ": [n for n in expected if n not in found or not torch.equal(found[n], expected[n])],
        "unchanged": all(torch.equal(again[n], value) for n, value in found.items()),
        "merged": [n for n in expected if n in apart and not torch.equal(apart[n], expected[n])],
    }


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"),
    [
        (3, 2, "bf16"),
        pytest.param(3, 3, "fp32", marks=pytest.mark.soak),
        pytest.param(0, 1, "bf16", marks=pytest.mark.soak),
        pytest.param(1, 2, "fp32", marks=pytest.mark.soak),
        pytest.param(2, 2, "bf16", marks=pytest.mark.soak),
    ],
)
def test_weights_with_adapters_are_bit_by_bit_those_of_merge_and_unload(
    kind: str, stage: int, ranks: int, dtype: str
) -> None:
    for told in run_ranks(exported, ranks, kind, stage, dtype):
        assert told == {"names": True, "described": True, "differ": [], "unchanged": True, "merged": []}


def without_adapters(kind: str) -> tuple[list[str], list[str]]:
    """Names of the weights that differ from the base model's while the adapters are off, and after that."""
    engine = trained(kind, 3, "bf16")
    apart = {n: t.clone() for bucket in engine.iter_full_weights(merge_adapters=False) for n, t in bucket}
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in apart.items()}
    found = []
    for state in (engine.module.disable_adapter(), nullcontext()):
        with state:
            weights = {n: t.clone() for bucket in engine.iter_full_weights() for n, t in bucket}
        found.append([name for name, value in weights.items() if not torch.equal(value, base[name])])
    return found[0], found[1]


def test_adapters_that_are_switched_off_are_not_merged() -> None:
    for off, on in run_ranks(without_adapters, 2, "some layers"):
        assert off == [] and on and all(name.startswith("model.layers.1.") for name in on)


def switched(where: str) -> list[str]:
    """Adapters are switched on one rank or on all, before a pass or inside it; then training goes on."""
    engine = trained("two", 3, "fp32")
    adapters = engine.module.base_model
    here = dist.get_rank() == 0 or where.startswith("all")
    said = "no error"
    try:
        if where == "one, before" and here:
            adapters.set_adapter("other0")
        for bucket in engine.iter_full_weights(1):
            if bucket.number == 2 and here and where.endswith("switched"):
                adapters.set_adapter("other0")
            if bucket.number == 2 and here and where.endswith("off"):
                adapters.disable_adapter_layers()
            if bucket.number == 2 and here and where.endswith("renewed"):
                adapters.set_adapter(["first", "other0"])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    adapters.enable_adapter_layers()
    adapters.set_adapter(["first", "other0"])
    return [said, str(len([name for bucket in engine.iter_full_weights() for name, _ in bucket]))]


@pytest.mark.parametrize("where", ("one, before", "one, switched", "all, switched", "one, off", "all, off", "renewed"))
def test_adapters_that_differ_or_change_while_iterating_are_refused_on_every_rank(where: str) -> None:
    words = {
        "one, before": "PartitionError: full weights: rank 1 has other weights than rank 0",
        "renewed": "no error",
    }.get(where, "PartitionError: full weights: adapters were switched or merged on rank 0 after bucket 3 of ")
    for said, count in run_ranks(switched, 2, where):
        assert said.startswith(words) and count == "21", (said, count)
