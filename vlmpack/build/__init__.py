"""Recipe -> engine, data, training policy: the room where a whole recipe is read.

setup          the recipe with what is made of it once: what the others take
data           encoder, collator, fetcher, and the splits opened with them (`shard_listing`: which
               shards the run's last launch had)
engine         engine, stepper
policy         what is trained, checked against the model
extensions     what a program handed over beside the recipe, by its `source_text`; its objective
               names its own faults (`checked_objective`, and `objective_rules` what it may not do),
               all ranks have the same (`agreement`)
absent         data of this disk that is not there, for a look at the recipe alone
read_only      a recipe's training split, opened again to look at
date           the one date of a run whose chat template writes the day
run_length     how many optimizer steps a run takes
worker_server  the server that loader processes fork from
"""
