"""Planning: from headers, index and config to a frozen Plan. No tensor data is read."""
