"""From shards to micro-batches, on the CPU. `pipeline.TrainData` is the door.

tools       the commands around training: index, lint
pipeline    TrainData: a split and the loader that feeds a rank from it
packs       rows made before training: write (`vlmpack pack`), open (as a split), restore
splits      survey (which shards, which shuffle), split (the interface), indexed (all first),
            streamed on growing_index and index_ahead (as the run goes on), checks, length_probe,
            identity, earlier (runs of versions before), summary
config      what the data layer is told
modes       how samples come to share rows: a value each
loading     read, loader, global_step: a planned bin -> a micro-batch; ledger (the holes)
plan        batches (all known), windows on streams (known as the run goes on), packs (made before),
            orders (seeded, by groups), blend; state and eras (where a run stands)
index       shard_index, lengths, parts (one a shard), gathered (many), shard_pool; table (all rows
            at once), groups, overlong, videos (which sample has one)
files       records (of JSON, JSONL, parquet), images (those that records name)
columns     form (how records of a source are read), layout (which there are), a file for each, chat
            (a record's turns and images), placing, preferences and spellings (as others write)
shards      tar, tar_header, naming, raw, schemas (turns, tools, keys), images, caps

Imports go down this list only; forkserver and protocols lie under all of it. The bytes come from
`vlmpack.storage`.
"""
