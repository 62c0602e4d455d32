"""One rank's training session: a model, an engine, and the state of a run."""
