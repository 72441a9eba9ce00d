"""What the training of several methods shares: examples, losses, replay, recipes, and the objective's protocol.

Methods build their objectives from these parts. The trainer (``anabranch.train``) knows the protocol only.
"""
