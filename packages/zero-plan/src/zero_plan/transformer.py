"""A transformer by its shape: parameters, floating-point operations, units."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlanError, at_least_one, one_of

CHECKPOINTING = ("none", "attention", "operators", "full")
"""The values that backward recomputes: none; the attention's scores; all but the attention's output and every second
matrix product of a block; everything but a block's input."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder: ``layers`` blocks of attention and MLP, an embedding and a head.

    ``hidden``: elements of a token between blocks. ``vocabulary``: tokens. ``sequence``: tokens of a sequence.
    ``kv_heads``: key and value heads, default ``heads``. ``ffn``: width of the MLP, default 4 × ``hidden``. ``gated``:
    the MLP has a gate (SwiGLU), so three matrices. ``bias``: linear layers and norms have one. ``positions``: learned
    position embeddings, default none. ``tied``: head and embedding share their weight. ``dropout``: masks are kept for
    backward. ``fused_attention``: scores are never stored (FlashAttention). Raises `PlanError` for counts below 1 and
    for heads that do not divide ``hidden``.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    bias: bool = False
    positions: int = 0
    tied: bool = False
    dropout: bool = False
    fused_attention: bool = True

    def __post_init__(self) -> None:
        at_least_one(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocabulary=self.vocabulary,
            sequence=self.sequence,
            kv_heads=self.key_heads,
            ffn=self.width,
        )
        if self.hidden % self.heads or self.heads % self.key_heads:
            raise PlanError(
                f"heads: expected a divisor of hidden ({self.hidden}) and a multiple of kv_heads ({self.key_heads}), "
                f"got {self.heads}"
            )

    @property
    def key_heads(self) -> int:
        """The number of key heads, which is also the number of value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def kv(self) -> int:
        """Elements of one token's keys in a block, which is also the number of its values' elements."""
        return self.hidden // self.heads * self.key_heads

    @property
    def width(self) -> int:
        """Features of one token inside the MLP."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def block_matrices(self) -> int:
        """Elements of the weight matrices of one block, without biases."""
        attention = 2 * self.hidden * (self.hidden + self.kv)
        return attention + (3 if self.gated else 2) * self.hidden * self.width

    @property
    def block_params(self) -> int:
        """Parameters of one block: matrices, two norms, biases."""
        norms = 2 * self.hidden * (2 if self.bias else 1)
        widths = 2 * self.hidden + 2 * self.kv + self.hidden + (2 if self.gated else 1) * self.width
        return self.block_matrices + norms + (widths if self.bias else 0)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embeddings of tokens and positions."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters of the last norm and of the head; a tied head has none of its own."""
        norm = self.hidden * (2 if self.bias else 1)
        return norm + (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def params(self) -> int:
        """Parameters of the model."""
        return self.layers * self.block_params + self.embedding_params + self.head_params

    @property
    def units(self) -> tuple[int, ...]:
        """Elements of each unit as FSDP2 and zero-partition choose them: every block, and the rest as one."""
        return (*[self.block_params] * self.layers, self.embedding_params + self.head_params)


def forward_flops(shape: Transformer, micro_batch: int) -> tuple[int, int, int]:
    """Return the floating-point operations of one rank's forward: (matrices of the blocks, attention scores, head).

    A product of an m × k and a k × n matrix is 2mkn operations. Scores and their product with the values are 4 · batch
    · sequence² · hidden per block, without the half that a causal mask could save (Narayanan et al. 2021, Megatron-LM
    on GPU clusters, arXiv 2104.04473, appendix). ``micro_batch``: sequences. Raises `PlanError` below 1.
    """
    at_least_one(micro_batch=micro_batch)
    tokens = micro_batch * shape.sequence
    matrices = 2 * tokens * shape.layers * shape.block_matrices
    scores = 4 * tokens * shape.sequence * shape.hidden * shape.layers
    return matrices, scores, 2 * tokens * shape.hidden * shape.vocabulary


def step_flops(shape: Transformer, micro_batch: int, *, accumulation: int = 1, checkpointing: str = "none") -> int:
    """Return the floating-point operations of one rank's step: forward, backward (twice as many), recomputation.

    With ``checkpointing="full"`` and a plain GPT this is 96·b·s·l·h² (1 + s/6h + V/16lh) per micro-batch (Narayanan et
    al. 2021, arXiv 2104.04473, equation 3). "attention" computes the scores again, "operators" every second matrix
    product of a block. Only matrix products count. Raises `PlanError` for an unknown ``checkpointing``.
    """
    at_least_one(accumulation=accumulation)
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    matrices, scores, head = forward_flops(shape, micro_batch)
    again = {
        "none": 0,
        "attention": scores,
        "operators": 2
        * micro_batch
        * shape.sequence
        * shape.layers
        * (shape.block_matrices - _kept_matrix_elements(shape)),
        "full": matrices + scores,
    }[checkpointing]
    return accumulation * (3 * (matrices + scores + head) + again)


def matrix_products(shape: Transformer) -> tuple[tuple[int, int], ...]:
    """Return (input features, output features) of every matrix product of a block, in the order of forward."""
    hidden, width = shape.hidden, shape.width
    attention = ((hidden, hidden), (hidden, shape.kv), (hidden, shape.kv), (hidden, hidden))
    up = ((hidden, width), (hidden, width)) if shape.gated else ((hidden, width),)
    return (*attention, *up, (width, hidden))


def _kept_matrix_elements(shape: Transformer) -> int:
    """Return the weight elements of every second matrix product of a block, those that checkpointing "operators" does
    not recompute.
    """
    return sum(inputs * outputs for inputs, outputs in matrix_products(shape)[::2])
