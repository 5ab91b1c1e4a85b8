"""Files of records that are no shards, and the images that they name."""
