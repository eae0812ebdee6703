"""Marks that people make on images: drafts in the catalog, commits that make versions of them, queues of images."""
