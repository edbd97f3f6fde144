"""Models of six families, and the peak of a real run of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from dry_models import Decoder
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from zero_offload._memory import anonymous_memory
from zero_offload.ends import HostUse, tier_ends
from zero_plan import Peak

WIDTH, HEADS, DEPTH, SEQUENCE, BATCH, VOCABULARY = 64, 4, 4, 48, 4, 500


class Blocks(nn.ModuleList):
    """Blocks one after the other; ``recompute``: their activations are computed again in backward."""

    def __init__(self, blocks: list[nn.Module], recompute: bool) -> None:
        super().__init__(blocks)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


class Attention(nn.Module):
    """Causal attention of a GPT."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Every expert sees every token, weighted by its router."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(feed_forward() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, feed: nn.Module, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.attention, self.feed_norm = nn.LayerNorm(WIDTH), Attention(causal), nn.LayerNorm(WIDTH)
        self.feed = feed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(self.feed_norm(x))


class Convolutions(nn.Module):
    """A residual block of convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.second = nn.GroupNorm(4, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Language(nn.Module):
    """A language model of blocks, with its loss."""

    def __init__(self, blocks: list[nn.Module], recompute: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks, self.norm = Blocks(blocks, recompute), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class EncoderDecoder(nn.Module):
    """torch's own layers for translation, with a loss."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.tokens, self.recompute = nn.Embedding(VOCABULARY, WIDTH), recompute
        options: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.encoder = Blocks([nn.TransformerEncoderLayer(WIDTH, HEADS, **options) for _ in range(2)], recompute)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, HEADS, **options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        memory = self.encoder(x)
        for layer in self.decoder:
            x = checkpoint(layer, x, memory, use_reentrant=False) if self.recompute else layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Vision(nn.Module):
    """A vision transformer over the patches of an image, with its loss."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.blocks = Blocks([Block(feed_forward(), causal=False) for _ in range(DEPTH)], recompute)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1)).square().mean()


class Convolutional(nn.Module):
    """A residual net, with its loss."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.blocks = Blocks([Convolutions(32) for _ in range(DEPTH)], recompute)
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3))).square().mean()


def gpt(recompute: bool) -> nn.Module:
    return Language([Block(feed_forward()) for _ in range(DEPTH)], recompute)


def experts(recompute: bool) -> nn.Module:
    return Language([Block(Experts()) for _ in range(DEPTH)], recompute)


def llama(recompute: bool) -> nn.Module:
    model = Decoder(WIDTH)
    if recompute:
        blocks = Blocks(list(model.blocks), recompute=True)
        model.blocks = nn.ModuleList([blocks])
    return model


MODELS = {
    "gpt": gpt,
    "llama": llama,
    "encoder-decoder": EncoderDecoder,
    "mixture of experts": experts,
    "vit": Vision,
    "convolutional": Convolutional,
}


class PeakCase(NamedTuple):
    """One run, planned and done. ``planted``: the engine of the real run keeps copies that no plan knows of."""

    model: str = "gpt"
    stage: int = 3
    recompute: bool = False
    dtype: str = "fp32"
    offload: str = "none"
    planted: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self.model](self.recompute)

    def batch(self) -> tuple[torch.Tensor, ...]:
        """Return a micro-batch of the model, in its dtype."""
        drawn = torch.Generator().manual_seed(0)
        if self.model in ("vit", "convolutional"):
            images = torch.rand(BATCH, 3, 32, 32, generator=drawn)
            return (images.bfloat16() if self.dtype == "bf16" else images,)
        tokens = torch.randint(250, (BATCH, SEQUENCE), generator=drawn)
        return (tokens, tokens) if self.model == "llama" else (tokens,)

    def config(self) -> dict[str, Any]:
        dtype = {"bf16": {"enabled": True}} if self.dtype == "bf16" else {}
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **dtype,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0, **self._offloaded()},
        }

    def _offloaded(self) -> dict[str, Any]:
        sections = {"optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
        return {section: {"device": "cpu"} for section in sections.get(self.offload, ())}


class LiveStorages(TorchDispatchMode):
    """Tells of every tensor that is made, by the engine too."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self._memory = memory

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._memory.track(tensor)
        return result


class MeasuredEnds:
    """Real memory for the tiers, followed."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        from zero_plan.dry_run.supervising import memory_tier_of, owner_rows

        with self._memory.assigning(memory_tier_of(use), owner_rows(use)):
            block = anonymous_memory(nbytes)
            self._memory.track(block)
        return block

    def io_engine(self, given: Any) -> Any:
        return given


def measure(cases: list[PeakCase], steps: int = 3) -> list[tuple[Peak, ...]]:
    """Train each case on this job's ranks; return the peaks of each, by live storages."""
    import zero_core
    from zero_plan.dry_run.peak_watch import PeakWatch

    found = []
    for case in cases:
        watch = PeakWatch()
        with watch, LiveStorages(watch.memory), tier_ends(MeasuredEnds(watch.memory)):
            engine = zero_core.initialize(model=case.build(), config=case.config())[0]
            batch = tuple(tensor.clone() for tensor in case.batch())
            watch.follow(engine)
            copies: list[torch.Tensor] = []
            for gradients in engine.partition.runtime.gradients.values() if case.planted else ():
                gradients.watches.append(lambda flat, _present, kept=copies: kept.append(flat.clone()))
            for _ in range(steps):
                watch.phase = "forward"
                loss = engine(*batch)
                watch.phase = "backward"
                engine.backward(loss)
                watch.phase = "step"
                engine.step()
            found.append(watch.peaks())
            engine.destroy(unshard=False)
    return found
