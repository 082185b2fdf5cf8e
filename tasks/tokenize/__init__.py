"""Conversations become samples: token ids, loss mask and key."""
