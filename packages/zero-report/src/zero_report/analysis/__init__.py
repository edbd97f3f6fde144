"""What a record says: who waited for what, how fast links were, which ranks differ. Read `waiting.py` first."""
