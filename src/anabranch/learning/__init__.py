"""Parts shared by the training of several methods: examples, losses, replay, recipes, and the objective's protocol.

Methods build their objectives from these parts. The trainer (``anabranch.train``) depends only on the protocol.
"""
