"""Pictures for people: boxes on images, grids of images, plots of statistics."""
