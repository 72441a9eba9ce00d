"""Tune speculation for a machine: measure step costs, replay recorded drafts, choose a drafter and check it."""
