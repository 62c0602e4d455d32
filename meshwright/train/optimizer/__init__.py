"""Optimizers and learning-rate schedules of a model that is split over ranks."""
