"""The page: what it shows as data, and the HTML around it. Read `report.py` first."""
