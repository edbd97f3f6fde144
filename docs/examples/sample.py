"""Continue a text with exported weights; plain torch and safetensors, no package of this repository."""

from __future__ import annotations

import argparse

import torch
from model import GPT, Shape
from safetensors.torch import load_file


@torch.no_grad()
def continue_text(model: GPT, prompt: bytes, count: int, temperature: float) -> bytes:
    """``prompt`` and ``count`` more bytes, drawn from the model's predictions."""
    text = torch.tensor([list(prompt)])
    for _ in range(count):
        logits = model.logits(text[:, -model.shape.context :])[0, -1]
        following = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
        text = torch.cat([text, following[None]], dim=1)
    return bytes(text[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="a safetensors file")
    parser.add_argument("--prompt", default="class Server:\n    def __init__(self, address):\n        self.")
    parser.add_argument("--bytes", type=int, default=320, help="how many to add")
    parser.add_argument("--context", type=int, default=Shape.context, help="bytes that a prediction looks back")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    weights = load_file(args.weights)
    layers = sum(name.endswith(".qkv.weight") for name in weights)
    model = GPT(Shape(layers, width=weights["norm.weight"].numel(), context=args.context))
    model.load_state_dict(weights)
    torch.set_num_threads(1)  # a byte at a time is too little work to share
    torch.manual_seed(args.seed)
    print(continue_text(model, args.prompt.encode(), args.bytes, args.temperature).decode(errors="replace"))


if __name__ == "__main__":
    main()
