"""Archives and folders that annotation tools export, as trees of files with checked names and sizes."""
