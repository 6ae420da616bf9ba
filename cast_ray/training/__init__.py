"""Makes a drafter for any causal LM from prompts alone: answers, features, training, evaluation, export.

Everything on the way lives in a work folder, so that each step goes on where it stopped.
"""
