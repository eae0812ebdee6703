"""Measure what a training step waits for, choose the number of workers, and say so in words."""
