"""How operations run on parts: one file per kind of operation."""
