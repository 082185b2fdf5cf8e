"""Conversations as token ids with a loss mask: sources, chat templates, masks, truncation."""
