"""Small models of Transformers in float64, their batches, and their training in one process and over shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from zero_sequence import SequenceGroups, Ulysses, sequence_loss, shift_labels

__import_ahead__ = [
    f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "mistral", "qwen2", "qwen3")
]
BATCH, LENGTH, WORDS = 2, 16, 40
_SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def gpt2(attention: str, **changes: Any) -> nn.Module:
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(**{**sizes, **off, "attn_implementation": attention, **changes})
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str, **changes: Any) -> nn.Module:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "attn_implementation": attention}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SMALL, **heads, **changes}))


def mistral(attention: str, **changes: Any) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 5, "attn_implementation": attention}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**_SMALL, **heads, **changes}))


def qwen2(attention: str, **changes: Any) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attn_implementation": attention}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**_SMALL, **heads, **changes}))


def qwen3(attention: str, **changes: Any) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "attn_implementation": attention}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_SMALL, **heads, **changes}))


def bert(attention: str, **changes: Any) -> nn.Module:
    off = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "num_attention_heads": 4}
    config = transformers.BertConfig(**{**_SMALL, **off, "attn_implementation": attention, **changes})
    return transformers.BertForMaskedLM(config)


@dataclass(frozen=True)
class Case:
    """A model and the kind of its batches: ``padded``, ``packed`` samples, or plain ones; shifted labels or not."""

    make: Callable[..., nn.Module]
    attention: str = "sdpa"
    padded: bool = False
    packed: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_causal(self) -> bool:
        return self.make is not bert

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make(self.attention, **self.changes).double()

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """A full batch of inputs, with ``targets``: what the output at each place is compared with."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
        labels = ids.clone()
        labels[0, : LENGTH // 2 + 1] = -100  # the first ranks have fewer valid tokens, or none
        batch = {"input_ids": ids, "targets": shift_labels(labels) if self.is_causal else labels}
        if self.padded:
            mask = torch.ones_like(ids)
            mask[1, LENGTH - 3 :] = 0
            batch["attention_mask"] = mask
            batch["targets"][1, LENGTH - 4 :] = -100
        if self.packed:
            positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
            batch["position_ids"] = positions.expand(BATCH, -1).contiguous()
        return batch


CASES = {
    "gpt2": Case(gpt2),
    "gpt2 eager": Case(gpt2, "eager"),
    "llama": Case(llama),
    "llama eager": Case(llama, "eager", padded=True),
    "llama packed": Case(llama, packed=True),
    "llama packed eager": Case(llama, "eager", packed=True),
    "mistral sliding": Case(mistral, packed=True),
    "qwen2": Case(qwen2, padded=True),
    "qwen3": Case(qwen3),
    "bert": Case(bert, padded=True),
    "bert eager": Case(bert, "eager"),
}


def token_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss over the valid tokens of ``batch``."""
    logits = model(**{key: value for key, value in batch.items() if key != "targets"}, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def one_process(case: Case, data: int, steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on the batches of ``data`` data groups in this process; return the weights and the mean losses."""
    model, losses = case.model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        loss = sum(token_losses(model, case.batch(100 * step + group)) for group in range(data)) / data
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return weights(model), losses


def shard(batch: dict[str, torch.Tensor], groups: SequenceGroups) -> dict[str, torch.Tensor]:
    return {key: value.chunk(groups.size, dim=1)[groups.rank].contiguous() for key, value in batch.items()}


def over_shards(names: list[str], size: int, steps: int) -> dict[str, Any]:
    """Train each case over sequence shards, with plain averages of gradients; weights and losses of this rank."""
    groups = SequenceGroups.open(size)
    answers = {}
    for name in names:
        case = CASES[name]
        model, losses = case.model(), []
        ulysses = Ulysses(model, groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            batch = shard(case.batch(100 * step + groups.get_data_parallel_rank()), groups)
            loss = sequence_loss(token_losses(model, batch), batch["targets"], groups.sequence)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        ulysses.detach()
        answers[name] = weights(model), losses, case.model().config._attn_implementation
    groups.close()
    return answers
