"""Keep named shards on the cheapest tier that can return them in time."""
