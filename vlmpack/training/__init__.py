"""What trains: objective, forward step, one optimizer step, the loop, checkpoints, metrics, record.

objective     what is minimised: the forward step, sums by name, their divisor, what is reported
preference    objectives over pairs of answers. `reference` has log-probabilities of their reference
step          one optimizer step: micro-batches in, updated weights and one report out
trainer       the loop, with checkpoints and a clean stop (`stop`), and the order of its listeners
listener      the interface of what follows a run's steps
evaluations   validation, answers on the way, the best step
reporting     a step's figures, and log lines about an objective's counts
callbacks     the program's hooks into its run
checkpoint    saving and loading
metrics       metrics.jsonl, the progress line
trackers      experiment trackers, through accelerate
record        which samples were trained at which step, and what no resume replaced
run_dir       the run folder. `run_lock` keeps others out of it
model_watch   which model a run is trained from
"""
