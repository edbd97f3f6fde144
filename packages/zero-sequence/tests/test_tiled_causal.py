"""Causal models of Transformers compute their loss in tiles, unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from live_storages import LiveStorages
from torch import nn

from zero_sequence import SequenceError, TiledCausalLoss

transformers = pytest.importorskip("transformers")

CLASSES, LENGTH = 97, 13
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "num_key_value_heads": 2, "vocab_size": CLASSES}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=CLASSES, n_positions=64)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(**LLAMA, head_dim=4, final_logit_softcapping=0.05)
    else:
        config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=kind == "tied llama")
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def run(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    loss = model(**batch(), **options).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def check(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bound: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=bound, atol=bound, check_dtype=False)


@pytest.mark.parametrize("items", (None, 7, torch.tensor(9)))
@pytest.mark.parametrize("kind", ("gpt2", "llama", "tied llama"))
def test_loss_and_gradients_are_those_of_the_model(kind: str, items: Any) -> None:
    model = make(kind)
    plain = copy.deepcopy(model)
    plain.loss_function = in_float64
    TiledCausalLoss(model, budget_bytes=5 * CLASSES * 16)
    check(run(model, num_items_in_batch=items), run(plain, num_items_in_batch=items), 1e-12)


def in_float64(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
    """Transformers' loss, which rounds logits to float32."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), shifted.flatten(), reduction=reduction)
    return loss / (1 if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_logits_are_one_tile(kind: str) -> None:
    model = make(kind)
    TiledCausalLoss(model, budget_bytes=5 * CLASSES * 16)

    def is_logits(tensor: torch.Tensor) -> bool:
        return tensor.dim() > 1 and tensor.size(-1) == CLASSES

    with LiveStorages(is_logits) as logits:
        run(model)
    assert logits.largest == 5 * CLASSES * 8


def test_without_labels_and_after_removal_the_model_is_as_before() -> None:
    model = make("llama")
    ids = batch()["input_ids"]
    theirs, whole = model(ids).logits, model(**batch()).loss
    tiles = TiledCausalLoss(model)
    assert torch.equal(model(ids).logits, theirs)
    assert model(**batch()).logits.shape == (2, 1, CLASSES)
    tiles.remove()
    assert torch.equal(model(**batch()).logits, theirs)
    assert torch.equal(model(**batch()).loss, whole)


def test_labels_may_be_shifted_already_and_the_loss_taken_after_the_call() -> None:
    model = make("llama")
    TiledCausalLoss(model)
    given = batch()
    expected = model(**given).loss
    shifted = nn.functional.pad(given.pop("labels"), (0, 1), value=-100)[..., 1:]
    logits = model(**given, shift_labels=shifted).logits
    assert torch.equal(model.loss_function(logits, None, CLASSES, shift_labels=shifted), expected)
    with pytest.raises(SequenceError, match="take the loss once"):
        model.loss_function(logits, None, CLASSES, shift_labels=shifted)


def test_logits_that_are_capped_after_the_head_need_a_head_that_caps_them() -> None:
    model = make("gemma2")
    plain = copy.deepcopy(model)
    plain.loss_function = in_float64
    tiles = TiledCausalLoss(model)
    with pytest.raises(SequenceError, match="Gemma2ForCausalLM, which scales or caps them"):
        model(**batch())
    tiles.remove()
    TiledCausalLoss(model, head=lambda hidden: torch.tanh(model.lm_head(hidden) / 0.05) * 0.05)
    check(run(model), run(plain), 1e-12)


@pytest.mark.parametrize("kind", ("linear", "decoder"))
def test_models_without_the_names_are_refused(kind: str) -> None:
    model = nn.Linear(2, 2) if kind == "linear" else make("llama").model
    with pytest.raises(SequenceError, match="expected a causal model of Transformers with a decoder and a head"):
        TiledCausalLoss(model)
