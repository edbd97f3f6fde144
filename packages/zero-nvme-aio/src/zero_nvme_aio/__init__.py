"""Move bytes between memory and files asynchronously, as fast as the disk goes."""
