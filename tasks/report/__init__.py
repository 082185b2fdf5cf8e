"""What a person sees: progress, tables, audits, pictures."""
