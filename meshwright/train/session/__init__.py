"""The training session of one rank: a model, an engine, and the state of a run."""
