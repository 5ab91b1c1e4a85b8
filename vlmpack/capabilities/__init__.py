"""What can be done with which model: plain data, read without torch.

`served` has the model_types that can be trained, a line each. `refused` has those that are refused
by name or by rule. `limits` has what an engine cannot do, and `table` all of it by version.
"""
