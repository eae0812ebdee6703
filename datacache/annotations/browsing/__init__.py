"""Find and count the images that a page shows: filters over arrays, and the histograms of what they mean."""
