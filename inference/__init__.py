"""What is done to models: objectives, training, importance weighting."""
