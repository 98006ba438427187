"""What only the scripts on the roof need: options, checkpoints, metrics, evaluation."""
