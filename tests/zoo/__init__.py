"""A tiny random model of every architecture class of transformers: converted, verified, loaded, computed."""
