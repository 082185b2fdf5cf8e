"""What the store lacks, in chunks."""
