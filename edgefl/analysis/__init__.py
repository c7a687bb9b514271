"""What people look at after a run: heterogeneity, personalization, profiles, reproduced results, and their charts."""
