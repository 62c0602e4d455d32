"""Output for people: terminal grids, pictures, Perfetto traces, comparisons and bottlenecks."""
