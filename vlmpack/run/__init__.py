"""One launch of a run: open or resume, train, answer before and after, export, result.json.

launch         the stages of a launch, in order; each value of a recipe ends here
place          where a rank works: ranks, run folder, watchdog, whose run it is
splits         the run's data, opened, and their log lines
launch_memory  the estimated memory of the launch, and what the machine has
opening        the model and its surroundings (`open_session`)
session        these parts, trained to the end
reference      the reference model of pairs, and `vlmpack reference`
result         answers before, during and after training, the exported model, result.json
export, card, push, packs, doctor    the commands of these names
"""
