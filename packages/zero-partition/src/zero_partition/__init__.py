"""Decide which rank owns which bytes, and have them in one piece when a module computes."""
