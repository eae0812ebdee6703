"""Frames of videos as images: a snapshot from the videos that lie under a URL.

`sampling` says which frames are meant, `ranges` reads a video from its store, `video` decodes it, `jpeg` makes images
of frames, and `frames` is the import. PyAV (the extra `video`) is imported where a video is opened.
"""
