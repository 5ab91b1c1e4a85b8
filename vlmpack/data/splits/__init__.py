"""A split as the pipeline uses it: indexed before the plan, or as the run goes on."""
