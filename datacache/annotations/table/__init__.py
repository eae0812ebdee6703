"""The annotation table: all that is known of a snapshot's images, as columns in blobs of the catalog."""
