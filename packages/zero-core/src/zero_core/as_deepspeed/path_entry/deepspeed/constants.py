"""Constants that scripts read."""

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
