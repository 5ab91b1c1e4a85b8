"""What trains: objective, forward step, one optimizer step, the loop, checkpoints, metrics, record.

objective     what is minimised: the forward step, sums by name, their divisor, what is reported
preference    objectives over pairs of answers; `reference`: log-probabilities of their reference
step          one optimizer step: micro-batches in, updated weights and one report out
trainer       the loop, with checkpoints and a clean stop (`stop`), and the order of its listeners
listener      what a listener is told of a step
evaluations   validation, answers on the way, the best step
reporting     a step's figures and what the log says of an objective's counts
callbacks     what a program is told of its run
checkpoint    saving and loading
metrics       metrics.jsonl, the progress line
trackers      experiment trackers, through accelerate
record        which samples were trained, at which step, and what of it stands
run_dir       the run folder; `run_lock`: one run at a time in it
model_watch   which model a run is trained from
"""
