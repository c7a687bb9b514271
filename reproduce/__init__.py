"""The papers' tables, run again: what is compared, what each run tells, and which of the claims hold."""
