"""Heterogeneity of users in labels, inputs, gradients and curvature, and its consequences in theory."""
