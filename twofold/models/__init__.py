"""Target and drafter: configuration, state, layers, and their Hugging Face checkpoints."""
