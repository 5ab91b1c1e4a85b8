"""What trains: objective, forward step, one optimizer step, the loop, checkpoints, metrics, record.

objective     what is minimised: sums by name, their divisor, what is reported
vlm_step      the forward step of a vision-language model
step          one optimizer step: micro-batches in, updated weights and one report out
trainer       the loop, with checkpoints and a clean stop (`stop`), and the order of its listeners
listener      what a listener is told of a step
evaluations   validation, answers on the way, the best step
reporting     a step's figures and what the log says of an objective's counts
callbacks     what a program is told of its run
checkpoint    saving and loading
metrics       metrics.jsonl, the progress line
trackers      experiment trackers, through accelerate, each in a `tracker_thread`
record        which samples were trained, at which step; `record_history`: what of it stands
run_dir       the run folder and its lock (`run_lock`)
model_record  which model a run is trained from (`model_watch`: hashed beside loading)
first_step    what is trained, checked at the first optimizer step
optim         the learning rate
"""
