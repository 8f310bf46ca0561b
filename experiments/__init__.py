"""What is run: one file a result, and the command line."""
