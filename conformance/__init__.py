"""The conformance suite: golden vectors of eleven peers, drivers for live peers, and code that makes new vectors."""
