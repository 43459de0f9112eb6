"""What can be told of a checkpoint alone, from headers, config files and a few small tensors: one module per rule."""
