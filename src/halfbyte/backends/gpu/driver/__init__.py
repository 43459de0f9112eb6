"""From commands to launches: compiled images and their cache on disk, the CUDA driver, Triton's interpreter."""
