"""Pieces of remote shards on a local disk: content-addressed, bounded, verified on every hit."""
