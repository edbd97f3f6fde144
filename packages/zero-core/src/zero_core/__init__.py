"""Compose the parts behind one `initialize`: the ZeRO family from one DeepSpeed-style JSON file."""
