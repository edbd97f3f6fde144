"""Models and micro-batches as users have them, for `Engine.train_batch` beside the ordinary loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from train_batch_runs import MICRO_BATCHES, Net, checkpointed_llama, llama

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**more: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    sizes: dict[str, Any] = {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **ends, **more))


def checkpointed_gpt2() -> nn.Module:
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=30, max_position_embeddings=16, **SIZES, **NO_DROPOUT))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    images: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_labels": 5}
    return ViTForImageClassification(ViTConfig(**SIZES, **NO_DROPOUT, **images))


def checkpointed_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = checkpointed_llama()
    model.enable_input_require_grads()
    choices = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found: nn.Module = get_peft_model(model, choices)
    return found


def compiled() -> nn.Module:
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


class Autocast(Net):
    """Computes under an autocast of its own."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = hidden + block(hidden, torch.ones(()))
            logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(1, 1).flatten())


class PartlyFixed(Net):
    """Its first block computes without gradients."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        with torch.no_grad():
            first = self.blocks[0](hidden, torch.ones(()))
        hidden = hidden + first
        for block in list(self.blocks)[1:]:
            hidden = hidden + block(hidden, torch.ones(()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


class Skipping(Net):
    """Drops whole blocks at random, by what it draws between units."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden, torch.ones(())) * (torch.rand(()) < 0.5)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(1, 1).flatten())


class Scored(Net):
    """Returns what a loss outside reads."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden, torch.ones(()))
        return {"logits": self.head(hidden), "hidden": hidden}


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor


class OfDataclass(Net):
    def forward(self, batch: Batch) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch.ids)


class OfTwo(Net):
    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(ids) * weight.mean()


def ids(step: int, ragged: bool = False) -> list[torch.Tensor]:
    """This rank's tokens of a step; ``ragged``: of another size on each rank and in each micro-batch."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sizes = [(2 + rank + n, 5 + n) if ragged else (2, 5) for n in range(MICRO_BATCHES)]
    return [torch.randint(0, 30, size, generator=generator) for size in sizes]


def text(step: int) -> list[Any]:
    return [{"input_ids": one, "labels": one} for one in ids(step)]


def masked(step: int) -> list[Any]:
    padded = torch.ones(2, 5, dtype=torch.int64).index_fill_(1, torch.tensor([4]), 0)
    return [{**one, "attention_mask": padded.clone()} for one in text(step)]


def ragged_text(step: int) -> list[Any]:
    return [{"input_ids": one, "labels": one} for one in ids(step, ragged=True)]


def images(step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    draws = [torch.randn(2, 3, 8, 8, generator=generator) for _ in range(MICRO_BATCHES)]
    return [{"pixel_values": one, "labels": one.sum((1, 2, 3)).long() % 5} for one in draws]


def own_loss(output: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = output["loss"] if isinstance(batch, dict) else output
    return found


def outside_loss(output: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch.flatten()) + output["hidden"].square().mean()


class Trial(NamedTuple):
    """A model, its micro-batches by step, its loss, and keys of the configuration."""

    build: Callable[[], nn.Module]
    given: Callable[[int], list[Any]]
    loss: Callable[[Any, Any], torch.Tensor] = own_loss
    keys: dict[str, Any] = {}  # noqa: RUF012


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
TRIALS: dict[str, Trial] = {
    "gpt2 with dropout": Trial(gpt2, masked),
    "checkpointed gpt2": Trial(checkpointed_gpt2, text),
    "llama of other sizes": Trial(llama(), ragged_text),
    "llama under autocast": Trial(llama(), text, keys=AUTOCAST),
    "bert under autocast": Trial(bert, masked, keys=AUTOCAST),
    "checkpointed lora": Trial(checkpointed_lora, text),
    "bert, whose head has a bias": Trial(bert, masked),
    "vit, whose embeddings have a token": Trial(vit, images),
    "compiled": Trial(compiled, ids),
    "autocast": Trial(Autocast, ids),
    "partly fixed": Trial(PartlyFixed, ids),
    "skipping": Trial(Skipping, ids),
    "a loss outside": Trial(Scored, ids, outside_loss),
    "dataclasses": Trial(OfDataclass, lambda step: [Batch(one) for one in ids(step)]),
    "tuples": Trial(OfTwo, lambda step: [(one, one.float()) for one in ids(step)]),
    "lists": Trial(OfTwo, lambda step: [[one, one.float()] for one in ids(step)]),
}
