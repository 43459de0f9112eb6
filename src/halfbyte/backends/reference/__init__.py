"""The numpy backend: the definition. Every other backend gives the same bits."""
