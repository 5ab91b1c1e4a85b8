"""Records as other people write them -> turns as our shards hold them, and the images they show."""
