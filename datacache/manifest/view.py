"""The directory tree over a manifest's sorted rows. No inode table: everything is found from a path prefix and a row."""
