"""Settings for every test."""

from hypothesis import settings

# A busy machine must not fail a test, and a failure must come back on the next run.
settings.register_profile("halfbyte", deadline=None, derandomize=True)
settings.load_profile("halfbyte")
