"""Real trained models beside the tiny random ones. Run by `make test-real`, which fetches 180 MB once."""
