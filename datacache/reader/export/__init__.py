"""Write a snapshot as a plain folder: which files, each file, the folder as a whole."""
