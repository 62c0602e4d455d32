"""How operations run on shards: one file per kind of operation."""
