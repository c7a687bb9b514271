"""Simulators on one task, one after another: edgefl's, pfl-research's and Flower's."""
