"""One contract a file, named after the project whose bytes it reproduces."""
