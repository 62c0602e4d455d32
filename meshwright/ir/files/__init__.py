"""File forms of schedules and measurements: JSON and CSV."""
