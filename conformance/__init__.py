"""The conformance suite: golden vectors of eleven peers, drivers for those that run here, and makers of new vectors."""
