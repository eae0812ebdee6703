"""A live bucket prefix as a directory to read and write: its server, supervisor and commands."""
