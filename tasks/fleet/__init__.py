"""Many nodes: shards are handed out, followed, and issued again when their node dies; what became of them."""
