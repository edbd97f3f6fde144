"""Say in which dtype each thing lives, and keep the loss scale honest."""
