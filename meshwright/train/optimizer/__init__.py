"""Optimizers and learning-rate schedules for a model that is split over ranks."""
