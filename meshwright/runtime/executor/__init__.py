"""The loop over a worker's list, and what each action does."""
