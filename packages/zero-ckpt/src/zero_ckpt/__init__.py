"""Save sharded state atomically; load it at any world size, stage or tier."""
