"""Optimizer, learning-rate schedules and gradient clipping, written from scratch."""
