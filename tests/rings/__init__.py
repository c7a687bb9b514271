"""The three rings of tests: what each file takes, and which slow tests a change asks for (docs/testing.md)."""
