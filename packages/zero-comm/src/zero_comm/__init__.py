"""The few collectives ZeRO needs, over torch.distributed, countable."""
