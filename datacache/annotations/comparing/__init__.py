"""Compare two annotation tables: versions of a data set, and predictions with labels."""
