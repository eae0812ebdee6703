"""Elastic training: tasks on lease, taken and reported by workers that come and go."""
