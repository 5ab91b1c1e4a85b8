"""From shards to micro-batches, on the CPU. `pipeline.TrainData` is the door.

bytes       fetch (the interface, local files), stores/ (s3, gs, az, hf, http), cache on blocks,
            block_store and background; sources (patterns -> shards)
shards      tar, tar_header, naming, raw, schemas, images, caps; energon (its index, compared)
index       index, lengths, parts (one file a shard), building, shard_pool; table (all rows at once)
plan        plan (all known), windows on streams (known as the run goes on), blend, overlong
split       survey (which shards, which shuffle), split (the interface), prepare and indexed (all
            first), streamed on shard_book and helpers (ahead of use), summary
batches     read, loader, forkserver, global_step; ledger (holes); state, segments (where it stands)
tools       index_shards, lint, show, show_picture, convert/
"""
