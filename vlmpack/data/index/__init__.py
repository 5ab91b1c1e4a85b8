"""What is known of shards without decoding a pixel: a parquet part each, and all rows at once."""
