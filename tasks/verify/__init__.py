"""Receipts of all ranks become verdicts."""
