"""Findings of a record: who waited for what, how fast links were, which ranks differ. Read `waiting.py` first."""
