"""What can be done with which model: plain data, read without torch.

served.py: the model_types that can be trained, a line each. refused.py: those that are refused by
name or by rule. limits.py: what an engine cannot do. table.py: all of it against versions.
"""
