"""Commands about results: heterogeneity and personalization."""
