"""The room where a whole recipe is read: it becomes four values, and each room takes its own.

data        DataSpec: the splits with their encoder; opens them
engine      EngineSpec: model, layout and policy; checks the model folder and builds the engine
objective   ObjectiveSpec: what is minimised, and how; builds the stepper
run         RunSpec: what happens around the steps; the run's length and date
extensions  what a program hands over beside the recipe, the same on all ranks; its code by
            `source_text`, and its objective by `checked_objective`, which names errors
look        a recipe or a run folder, opened to look at
worker_server  the server that loader processes fork from
"""
