"""The peers' end of the protocol. These scripts run in the peer's interpreter and import the engine, but not anabranch.

Run as ``python -m servers.NAME`` with the parent folder on the import path, so that ``import transformers`` finds the
engine and not the script of that name.
"""
