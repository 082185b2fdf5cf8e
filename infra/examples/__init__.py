"""Short programs that read what Layertap stores, to be copied from."""
