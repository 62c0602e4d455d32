"""Pictures of timelines, layouts and runs: shapes first, then SVG or PNG."""
