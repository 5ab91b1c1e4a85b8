"""From shards to micro-batches, on the CPU. `pipeline.TrainData` is the door.

tools       the commands around training: index, lint
pipeline    TrainData: a split and the loader that feeds a rank from it
packs       rows made before training: write (`vlmpack pack`), open (as a split, and bin by bin)
splits      survey (which shards, which shuffle), split (the interface), indexed (all first),
            streamed on growing_index (as the run goes on), checks, summary
config      what the data layer is told
modes       how samples come to share rows: a value each
loading     read, loader: a planned bin -> a micro-batch; replica (processes that train the same
            rows), workers, pair_columns; ledger (the holes)
plan        batches (all known), windows (known as the run goes on), packs (made before), blend
            (seeded orders, draws of each source); state (where a run stands)
index       shard_index, lengths, parts (one a shard, or many gathered), shard_pool; table (all rows
            at once), groups, overlong, videos (which sample has one)
files       texts (JSONL, JSON, CSV), tables (parquet, Arrow), records (which opens them),
            samples (of files), shard_samples (of shards in other layouts), images (those that
            records name), source_form (how a source is read), registered (a program's sources)
columns     layouts (which there are), form (the one that a source's records have), chat (a record's
            turns and images), preferences (its pair), image_columns
shards      writer; unlisted; tar, naming, samples, turns, turn_parts, keys

Imports go down this list only; forkserver and protocols lie under all of it. The bytes come from
`vlmpack.storage`.
"""
