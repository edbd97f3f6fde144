"""Start one process per rank, here or on many hosts, and tell the truth about how they died."""
