"""Timelines and schedules for people: terminal grids, Perfetto traces."""
