"""The engine and the capture worker: states are staged as files, and small receipts come back."""
