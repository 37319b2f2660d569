"""What this machine is and can do, each fact on its own: a value, or why it is not known."""
