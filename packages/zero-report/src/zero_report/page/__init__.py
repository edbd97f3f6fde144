"""The page: its data, and the HTML around them. Read `report.py` first."""
