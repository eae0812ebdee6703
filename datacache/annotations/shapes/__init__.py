"""Shapes of objects beyond the box: their values, masks, and geometry."""
