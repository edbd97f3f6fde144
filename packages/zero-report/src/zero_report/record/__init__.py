"""The record of a run: its format, its writer and its reader. Read `schema.py` first."""
