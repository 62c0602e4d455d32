"""Small programs that show what Meshwright does."""
