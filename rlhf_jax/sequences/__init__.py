"""Token sequences with their columns, and their packed form."""
