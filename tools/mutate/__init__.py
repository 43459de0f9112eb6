"""Change the code in small ways and see whether the tests notice."""
