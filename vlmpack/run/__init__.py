"""One launch of a run: open or resume, train, answer before and after, export, result.json.

launch         the stages of a launch, in order
place          where a rank works: ranks, run folder, watchdog, whose run it is
opening        every part of a run, opened on one rank (`open_session`)
session        those parts, trained to the end
resume_point   the newest checkpoint that verifies, and its place in the data
begun_steps    the run's global batches, read while the model is loaded
launch_memory  what the launch will need beside what the machine has (`machine_memory`)
result         what surrounds training: answers, the exported model, result.json
export, packs  `vlmpack export` and `vlmpack pack`
data_summary, skip_notes  what a launch says of its data, and of samples that it skips
"""
