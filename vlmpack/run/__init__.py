"""One launch of a run: open or resume, train, answer before and after, export, result.json.

launch         the stages of a launch, in order; each value of a recipe ends here
place          where a rank works: ranks, run folder, watchdog, whose run it is
splits         the run's data, opened, and what is said of them
launch_memory  what the launch will need beside what the machine has
opening        the model and all that is around it (`open_session`)
session        these parts, trained to the end
reference      the reference model of pairs, and `vlmpack reference`
answers        to the test questions, before, during and after training
result         the exported model, result.json
export, card, push, packs, doctor    the commands of these names
"""
