"""One contract per file. The file is named after the project whose bytes it reproduces."""
