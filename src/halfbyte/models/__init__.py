"""What a model is, from its config and the names of its tensors. No model code runs."""
