"""From shards to micro-batches, on the CPU. `pipeline.TrainData` is the entry point.

    tools       commands around training: index, lint, stats
    pipeline    TrainData: a split and the loader that feeds a rank from it, with columns of pairs
    packs       rows made before training: write (`vlmpack pack`), open (as a split, and bin by bin)
    splits      survey (shards and shuffle), split (the interface), indexed (all first),
                streamed on growing_index (during the run), summary (figures and checks)
    config      the settings of a split
    modes       how samples come to share rows
    loading     read and loader (a planned bin -> a micro-batch), replica (processes that train the
                same rows), workers, ledger (the holes)
    plan        batches (samples known), windows (shards indexed during the run), packs (saved),
                state (where a run stands)
    index       shard_index, lengths, parts (cache files), shard_pool, table (all rows at once, and
                those that are too long), groups, held_out
    files       texts (JSONL, JSON, CSV), tables (parquet, Arrow), records (opens them), samples,
                shard_samples (shards in other layouts), images, source_form (how a source is
                read), registered (a program's sources)
    columns     layouts, form (a source's layout), chat (turns, images, pairs), image_columns
    shards      writer, unlisted, tar, naming (of members and keys), samples, turns, turn_parts

Imports go down this list only. forkserver, protocols and server_memory (the server that loader
processes fork from) lie under all of it. The bytes come from `vlmpack.storage`.
"""
