"""What each rank is doing, and which rank failed first."""
