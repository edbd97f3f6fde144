"""A converted checkpoint loads in transformers, with tied weights tied."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import zero_ckpt  # noqa: E402

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.mark.parametrize("limit", [None, "20KB"])
def test_a_causal_language_model_loads_from_what_is_converted(tmp_path: Path, limit: str | None) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=101, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    zero_ckpt.save(tmp_path / "ckpt", {"model": model})
    files = zero_ckpt.convert(tmp_path / "ckpt", tmp_path / "hf", max_shard_size=limit)
    assert (len(files) > 1) == (limit is not None)
    config.save_pretrained(tmp_path / "hf")
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
