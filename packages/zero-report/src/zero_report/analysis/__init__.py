"""The analysis of a record: causes of waits, speeds of links, how the run ended. Read `waiting.py` first."""
