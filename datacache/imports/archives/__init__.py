"""Archives and folders that annotation tools export: checked members, and their bytes."""
