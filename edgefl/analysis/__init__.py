"""What people look at after a run: heterogeneity, personalization, profiles, and their charts."""
