"""Commands about results: heterogeneity, personalization, reproduced tables."""
