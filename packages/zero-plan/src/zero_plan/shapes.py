"""Shapes of transformers by name, and from the `config.json` of a Transformers model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import PlanError, nearest
from .transformer import Transformer

SHAPES = {
    "gpt2-xl": Transformer(
        48, 1600, 25, 50257, 1024, bias=True, positions=1024, tied=True, dropout=True, fused_attention=False
    ),
    "llama-3-8b": Transformer(32, 4096, 32, 128256, 8192, kv_heads=8, ffn=14336, gated=True),
    "llama-3-70b": Transformer(80, 8192, 64, 128256, 8192, kv_heads=8, ffn=28672, gated=True),
}
"""GPT-2 1.5B (Radford et al. 2019) and Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, table 3)."""


def load_shape(name: str, given: Mapping[str, Any] | None = None) -> Transformer:
    """Return the shape ``name`` of `SHAPES`, or that of the `config.json` at the path ``name``; ``given`` replaces some
    of its fields.

    Raises `PlanError` for an unknown name, with the nearest one, for a file that describes another kind of model, and
    for numbers that fit no `Transformer`.
    """
    if name in SHAPES:
        return replace(SHAPES[name], **(given or {}))
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        raise PlanError(
            f"no shape {name!r}: expected a config.json or one of {', '.join(SHAPES)}{nearest(name, SHAPES)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{name}: cannot be read as JSON: {error}") from error
    return replace(_shape_from_config(config, name), **(given or {}))


def _shape_from_config(config: Any, name: str) -> Transformer:
    """Return the shape that ``config``, the content of a `config.json`, describes; ``name``: of the file, for errors.
    Raises `PlanError` for another kind of model than GPT-2, Llama and Mistral, or a missing key.
    """
    kind = config.get("model_type") if isinstance(config, dict) else None
    try:
        if kind == "gpt2":
            return Transformer(
                config["n_layer"],
                config["n_embd"],
                config["n_head"],
                config["vocab_size"],
                config["n_positions"],
                ffn=config.get("n_inner"),
                bias=True,
                positions=config["n_positions"],
                tied=config.get("tie_word_embeddings", True),
                dropout=bool(config.get("resid_pdrop", 0.1)),
            )
        if kind in ("llama", "mistral"):
            return Transformer(
                config["num_hidden_layers"],
                config["hidden_size"],
                config["num_attention_heads"],
                config["vocab_size"],
                config["max_position_embeddings"],
                kv_heads=config.get("num_key_value_heads"),
                ffn=config["intermediate_size"],
                gated=True,
                tied=config.get("tie_word_embeddings", False),
            )
    except KeyError as error:
        raise PlanError(f"{name}: the key {error} is missing") from None
    raise PlanError(
        f"{name}: expected model_type gpt2, llama or mistral, got {kind!r}; give --layers, --hidden, … instead"
    )
