"""Settings for every test."""

from hypothesis import settings

# A busy machine must not make a test fail, and a failure must appear again on the next run.
settings.register_profile("halfbyte", deadline=None, derandomize=True)
settings.load_profile("halfbyte")
