"""One tar shard: its members, its samples, their images' headers."""
