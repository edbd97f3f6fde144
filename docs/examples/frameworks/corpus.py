"""A small GPT-2 and text for it, so that the scripts beside this file need nothing from the network."""

from __future__ import annotations

import calendar
import textwrap
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 64


class Text(Dataset[dict[str, torch.Tensor]]):
    """The bytes of two modules of Python's library, in pieces of LENGTH."""

    def __init__(self) -> None:
        files = [Path(module.__file__ or "") for module in (calendar, textwrap)]
        data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def small_gpt2() -> GPT2LMHeadModel:
    """One token per byte; 0.1 million parameters."""
    torch.manual_seed(0)
    size = {"n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, pad_token_id=0, **size))
