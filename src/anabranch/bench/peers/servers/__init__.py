"""The peers' end of the wire. These scripts run in the peer's interpreter: they import the engine and nothing of ours.

Run as ``python -m servers.NAME`` with the folder above this one on the import path, so that ``import transformers``
finds the engine and not the script of that name.
"""
