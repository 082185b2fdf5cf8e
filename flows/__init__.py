"""The flows: the order of the steps, and the command line that starts them."""
